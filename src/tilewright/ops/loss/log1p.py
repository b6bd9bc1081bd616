"""log(1 + u) of a u from 0 to 1, as kernels compute it: a polynomial, where a logarithm and a correction for what 1 + u
loses of a small u cost as much as all the rest of a loss. Needs neither Triton nor TileLang."""

LOG1P = (
    1.0,
    -0.4999990165233612,
    0.3332996368408203,
    -0.24954132735729218,
    0.19675935804843903,
    -0.1530558466911316,
    0.10603640973567963,
    -0.056959398090839386,
    0.01985139027237892,
    -0.0032440091017633677,
)
"""Of log(1 + u) / u, by rising powers: the minimax polynomial of degree 9 (Lawson's iteration), in float32. Off by 5e-9
at most before rounding; evaluated in float32 by Horner's rule, by 1.7 ulp."""
