"""Where the elements of a tile live: registers, lanes and warps of a GPU."""
