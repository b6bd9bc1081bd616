"""Whole models: patching other people's so that the library's ops serve them, and the demo.

Nothing of transformers is imported here; modules are recognised by what they are and do.
"""

from tilewright.models.patching import Kept, Patched, Report, patch, unpatch

__all__ = ["Kept", "Patched", "Report", "patch", "unpatch"]
