"""RODEO: control variates from a discrete Stein operator. It extends the estimator of ``double_cv.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from double_cv import OnSlopes, guide, model
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_bpq import TraceBackpropQ_ELBO


@dataclass(frozen=True)
class RODEO(OnSlopes):
    r"""Leave-one-out with control variates from a discrete Stein operator on functions of the slopes.

    With ``t_k(y) = c_k·(y - μ_k)`` and ``c_k`` the mean slope of the other particles, as in ``DoubleCV``, the function
    ``h_k(y) = a_1 t_k(y) + a_2 t_k(y)²`` predicts the cost. For component ``d`` the operator averages over its values
    with the other components kept:

        g_{k,d} = (f_k - h_k(x_k) - b_k) ∇ log q_d(x_{k,d}) + Σ_v ∇q_d(v) h_k(x_k with x_{k,d} = v)

    ``b_k`` is as in ``DoubleCV``. The paper trains a network in place of ``h``. Here the weights of ``h`` are those of
    least variance, from running moments of earlier steps. Unbiased for any weights.

    Args:
        decay: Weight of the past in the running moments.

    References:
        Gradient estimation with discrete Stein operators (Shi et al., 2022)
    """

    decay: float = 0.98

    degree: ClassVar[int] = 2


if __name__ == "__main__":
    svi = SVI(model, guide, Adam({"lr": 0.05}), TraceBackpropQ_ELBO(4, estimator=RODEO()))
    print("mean loss of 200 steps:", sum(svi.step() for _ in range(200)) / 200)
