"""BibTeX of what is in use."""

from __future__ import annotations

import re

import pyro
import pytest
import torch
from models import BY_NAME

import pyro_bpq.estimators as estimators
from pyro_bpq import LeaveOneOut, LinearCritic, RunningBaseline, ScoreFunction, TraceBackpropQ_ELBO
from pyro_bpq.diagnostics.citation import Reference, citation, references
from pyro_bpq.estimators import DisARM


def keys(text: str) -> list[str]:
    return re.findall(r"^@\w+\{(\w+),", text, re.MULTILINE)


def test_citation_names_what_is_in_use() -> None:
    case = BY_NAME["discrete_above_reparam"]
    case.params()
    elbo = TraceBackpropQ_ELBO(num_particles=2)
    elbo.loss_and_grads(case.model, case.guide, *case.args)
    text = citation(elbo)
    assert keys(text)[:2] == ["xu2018backpropq", "bingham2019pyro"]
    assert {"titsias2015local", "kingma2014autoencoding", "wang2016dueling", "defazio2024road"} <= set(keys(text))
    assert "% AllAction at z" in text and "Pathwise at x" in text
    assert "kool2019buy" not in text and text.count("{") == text.count("}")


def test_citation_follows_the_choice() -> None:
    plain = citation(TraceBackpropQ_ELBO(2, estimator=ScoreFunction(LeaveOneOut()), critic=LinearCritic()))
    assert {"williams1992simple", "kool2019buy"} <= set(keys(plain))
    assert not {"wang2016dueling", "titsias2015local", "schulman2016highdimensional"} & set(keys(plain))
    other = citation(TraceBackpropQ_ELBO(estimator=ScoreFunction(RunningBaseline()), critic=None))
    assert "kool2019buy" not in other
    assert "dong2020disarm" in citation(TraceBackpropQ_ELBO(estimator=DisARM()))
    assert len(keys(plain)) == len(set(keys(plain)))


@pytest.mark.parametrize(
    "name", [name for name in estimators.__all__ if hasattr(getattr(estimators, name), "is_unbiased")]
)
def test_every_estimator_has_a_reference(name: str) -> None:
    estimator = getattr(estimators, name)
    if getattr(estimator, "_is_protocol", False):
        pytest.skip("a protocol")
    for reference in references(estimator):
        assert reference.title and reference.authors and 1950 < int(reference.year) < 2100
    assert references(estimator), f"{name} names no paper in its References section"


def test_docstrings_are_read_as_they_are_written() -> None:
    class Method:
        """Something.

        References:
            | A method for things with a long title that goes on
              in a second line (Doe and Roe, 2031), Eq. 3
            | https://arxiv.org/abs/3101.00001
            | Sec. 4 of the same

        Limits:
            | Not a reference (Foe, 1999)
        """

    (found,) = references(Method())
    title = "A method for things with a long title that goes on in a second line"
    assert found == Reference(title, "Doe and Roe", "2031", "3101.00001")
    assert found.key == "doe2031method" and "eprint" in found.bibtex() and references(torch.add) == ()


def test_lines_without_bars_are_read_too() -> None:
    def method() -> None:
        """Something.

        References:
            One method of
              two lines (Doe, 2031), Eq. 1
            Another method (Roe et al., 2032)
        """

    found = references(method)
    assert [(r.title, r.authors, r.year) for r in found] == [
        ("One method of two lines", "Doe", "2031"),
        ("Another method", "Roe and others", "2032"),
    ]


def test_citation_leaves_nothing_behind() -> None:
    citation(TraceBackpropQ_ELBO())
    assert not list(pyro.get_param_store().keys())
