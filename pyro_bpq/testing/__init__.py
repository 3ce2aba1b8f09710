r"""Checks whether a gradient estimator is right, without sampling.

For a program with few joint states both the exact and the expected gradient can be computed to rounding error:

    exact     ∇ J,   J = Σ_state q(state) · (log q(state) - log p(state))     :func:`exact_gradient`
    expected  Σ_outcome P(outcome) · gradient that the step computes          :func:`expected_gradient`

``J`` is the loss, the negative ELBO in nats, as Pyro scores it. A *state* is one value for every latent site of the
guide and one subset for every subsampled plate. An *outcome* is everything that one training step draws, all particles
jointly. :func:`assert_unbiased` compares the two gradients; it needs no seed, and its tolerance is for rounding only.
:func:`z_scores` is for programs too large for this.

A latent site must have a finite support, or be a :class:`TwoPoint` in place of a reparameterised distribution, or a
``Delta``. Use float64: the tolerances below assume it. Programs must be deterministic given their draws through
``pyro.sample``. Sites hidden by ``poutine.block`` and noise of an estimator cannot be enumerated, except noise drawn
through :class:`ChoiceNoise`; other draws raise an error. Latents of the model must be in the guide.

May import every other folder but ``diagnostics``. Read ``exact.py`` first, then ``choices.py``.
"""

from pyro_bpq.testing.choices import ChoiceNoise as ChoiceNoise
from pyro_bpq.testing.choices import TwoPoint as TwoPoint
from pyro_bpq.testing.choices import iter_outcomes as iter_outcomes
from pyro_bpq.testing.contract import check_estimator as check_estimator
from pyro_bpq.testing.exact import assert_unbiased as assert_unbiased
from pyro_bpq.testing.exact import exact_gradient as exact_gradient
from pyro_bpq.testing.exact import exact_loss as exact_loss
from pyro_bpq.testing.exact import sample_gradients as sample_gradients
from pyro_bpq.testing.exact import z_scores as z_scores
from pyro_bpq.testing.moments import GradientMoments as GradientMoments
from pyro_bpq.testing.moments import expected_gradient as expected_gradient
from pyro_bpq.testing.moments import expected_moments as expected_moments

Moments = GradientMoments

__all__ = sorted(name for name, thing in globals().items() if callable(thing) and not name.startswith("_"))
