"""The backends, in the order in which an unmeasured kernel of theirs is preferred. One file each, loaded on demand."""

from tilewright.core import registry

for _name, _place in (
    ("cuda", "tilewright.backends.cuda:CudaBackend"),
    ("triton", "tilewright.backends.triton:TritonBackend"),
    ("tilelang", "tilewright.backends.tilelang:TileLangBackend"),
    ("vendor", "tilewright.backends.vendor:VendorBackend"),
    ("reference", "tilewright.backends.reference:ReferenceBackend"),
    ("tile", "tilewright.backends.tile:TileBackend"),
    ("inductor", "tilewright.backends.inductor:InductorBackend"),
):
    registry.add_backend(_name, _place)
