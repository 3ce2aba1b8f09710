"""What ``import pyro_bpq`` costs and touches, seen from processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Parts of the package, and of torch, that few programs use and that take long to import.
LAZY = ("pyro_bpq.diagnostics", "pyro_bpq.testing", "pyro_bpq.compiled.recorder", "torch._dynamo", "torch._inductor")

# Runs `import torch, pyro`, then the statement in argv[1], and prints what that statement changed.
PROBE = r"""
import hashlib, json, random, sys, types, warnings
import torch, pyro
import numpy

OURS = "pyro_bpq"
WATCHED = ("pyro", "torch")
# Rewritten by the class machinery for each subclass that is defined, or counters of it.
NOISE = {"__abstractmethods__", "_abc_impl", "__dict__", "__weakref__", "__doc__", "__subclasshook__"}

def is_watched(name):
    return name.split(".")[0] in WATCHED

def settings():
    general = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad enabled": torch.is_grad_enabled(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "torch validation": torch.distributions.Distribution._validate_args,
        "random states": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        "numpy state": hashlib.sha256(repr(numpy.random.get_state()).encode()).hexdigest(),
        "torch state": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "param store": sorted(pyro.get_param_store().keys()),
        "handlers": len(pyro.poutine.runtime._PYRO_STACK),
        "warning filters": list(map(str, warnings.filters)),
        "excepthook": id(sys.excepthook),
        "numpy errors": numpy.geterr(),
    }
    return general | {f"pyro.settings {key}": value for key, value in pyro.settings.get().items()}

def attributes():
    seen = {}
    for name, module in list(sys.modules.items()):
        if not is_watched(name) or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            seen[name, key] = value
            if isinstance(value, (dict, list, set)) and name.startswith(("pyro", "torch.distributions")):
                seen[name, key, "length"] = len(value)
            if isinstance(value, type) and is_watched(value.__module__):
                members = {k: v for k, v in vars(value).items() if k not in NOISE}
                seen |= {(name, key, "member", k): v for k, v in members.items()}
                seen[name, key, "members"] = sorted(members)
    return seen

def is_same(before, after):
    return before is after or (type(before) in (int, list) and before == after)

def packages():
    return {name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)

options, held, loaded, before = settings(), attributes(), packages(), set(sys.modules)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    exec(sys.argv[1])

later, now = settings(), attributes()
print(json.dumps({
    "warnings": [str(w.message) for w in caught],
    "settings": sorted(key for key in options if options[key] != later.get(key)),
    "patched": sorted(".".join(key) for key in held if key not in now or not is_same(held[key], now[key])),
    "modules": sorted(set(sys.modules) - before),
    "packages": sorted(packages() - loaded - {OURS}),
}))
"""


def probe(statement):
    command = [sys.executable, "-c", PROBE, statement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def report():
    return probe("import pyro_bpq")


def test_import_leaves_out_what_few_programs_use(report):
    assert "pyro_bpq.objectives.elbo" in report["modules"]
    assert not set(LAZY) & set(report["modules"])


@pytest.fixture(scope="module")
def whole():
    """With the folders that are imported late."""
    return probe("import pyro_bpq.diagnostics, pyro_bpq.testing")


@pytest.mark.parametrize("part", ["settings", "patched", "packages", "warnings"])
def test_import_changes_no_setting_patches_nothing_draws_no_package_and_warns_of_nothing(whole, part):
    assert not whole[part]


def test_probe_finds_planted_faults():
    report = probe(
        "torch.set_default_dtype(torch.float64)\n"
        "pyro.infer.Trace_ELBO = object\n"
        "pyro.infer.TraceGraph_ELBO.loss = None\n"
        "torch.distributions.Normal.planted = 1\n"
        "torch.rand(1)\n"
        "warnings.warn('planted')\n"
        "import networkx\n"
    )
    patched = {"pyro.infer.Trace_ELBO", "pyro.infer.TraceGraph_ELBO.member.loss", "torch.distributions.Normal.members"}
    assert {"default dtype", "torch state"} <= set(report["settings"]) and patched <= set(report["patched"])
    assert "networkx" in report["packages"] and "planted" in report["warnings"]
