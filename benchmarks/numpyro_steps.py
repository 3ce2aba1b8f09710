r"""NumPyro's score function on the chain of ``compiled.py``: milliseconds of jitted steps.

It needs ``numpyro`` and nothing of this project, so it may run in an environment of its own. A step is
``svi.update`` under ``jax.jit``, with Adam; its ``TraceGraph_ELBO`` charges a site with the costs downstream of it and
has no baselines. It prints one JSON object a line.

    python benchmarks/numpyro_steps.py
"""

from __future__ import annotations

import json
import os
import statistics
import time

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, TraceGraph_ELBO
from numpyro.optim import Adam

SITES, ROUNDS, OBSERVED = 50, 12, 0.7


def program() -> tuple[object, object]:
    """Model and guide: binary sites, each conditioned on the one before, and an observation at the end."""

    def model() -> None:
        start, step, means = (numpyro.param(name, jnp.zeros(2)) for name in ("prior", "next", "means"))
        z = numpyro.sample("z_0", dist.BernoulliLogits(start[0]))
        for t in range(1, SITES):
            z = numpyro.sample(f"z_{t}", dist.BernoulliLogits(step[0] + step[1] * z))
        numpyro.sample("x", dist.Normal(means[0] + means[1] * z, 1.0), obs=OBSERVED)

    def guide() -> None:
        logits, slope = numpyro.param("posterior", jnp.zeros(SITES)), numpyro.param("slope", jnp.asarray(0.5))
        z = 0.0
        for t in range(SITES):
            z = numpyro.sample(f"z_{t}", dist.BernoulliLogits(logits[t] + slope * z))

    return model, guide


def measure(particles: int) -> dict[str, float]:
    """Milliseconds of a step, and seconds until the first compiled one."""
    svi = SVI(*program(), Adam(1e-3), TraceGraph_ELBO(num_particles=particles))
    start = time.perf_counter()
    state = svi.init(jax.random.PRNGKey(0))
    update = jax.jit(svi.update, donate_argnums=0)
    state, loss = update(state)
    loss.block_until_ready()
    made = time.perf_counter() - start
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(20):
            state, loss = update(state)
            float(loss)
        times.append((time.process_time() - start) / 20)
    return {"seconds to make": made, "milliseconds": 1000 * statistics.median(times), "least": 1000 * min(times)}


def main() -> None:
    """Measures and prints."""
    for particles in (1, 1000):
        print(json.dumps({"particles": particles, **measure(particles)}), flush=True)


if __name__ == "__main__":
    main()
