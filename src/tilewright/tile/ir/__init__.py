"""The two program forms of the compiler: tiles (L0) and one thread (L1), each with its verifier."""
