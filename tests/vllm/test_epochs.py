"""Epochs: nothing forgotten is found, no other weights' KV is, and ranks go on sharing."""

from __future__ import annotations

import pytest

from lamina.engines.vllm.epochs import Epochs


def watched(engine: str = "e") -> Epochs:
    epochs = Epochs(engine)
    epochs.watched(True)
    return epochs


def after(epochs: Epochs, forget: bool, change: str | None) -> str:
    """The epoch after a reset at which a rank's weights look so."""
    epochs.reset(forget)
    assert epochs.current is None, "known before the weights were looked at"
    epochs.looked(epochs.resets, [change])
    assert epochs.current is not None
    return epochs.current


def test_a_reset_that_changes_nothing_goes_on() -> None:
    epochs = watched()
    assert epochs.current == ""
    assert after(epochs, False, "") == ""


def test_what_is_to_be_forgotten_is_in_an_epoch_of_its_own() -> None:
    epochs = watched()
    seen = ["", *(after(epochs, True, "") for _ in range(3))]
    assert len(set(seen)) == 4
    assert after(epochs, False, "") == seen[-1]  # vLLM's own cache only


def test_other_weights_name_their_epoch() -> None:
    epochs = watched()
    one, two = after(epochs, False, "one"), after(epochs, False, "two")
    assert len({"", one, two}) == 3
    assert after(epochs, False, "one") == one
    assert after(epochs, False, "") == ""


def test_ranks_of_one_engine_are_in_one_epoch_and_other_engines_are_not() -> None:
    ranks = [watched("e_dp0"), watched("e_dp1"), watched("e")]
    assert len({after(rank, True, "") for rank in ranks}) == 1
    assert after(watched("other"), True, "") != ranks[0].current
    assert after(ranks[0], True, "") != ranks[1].current  # until it has forgotten as often
    assert after(ranks[1], True, "") == ranks[0].current


def test_ranks_that_have_other_weights_for_a_while_do_not_share() -> None:
    """One is updated before it is reset, the other after it was: they were reset equally often."""
    early, late = watched("e_dp0"), watched("e_dp1")
    assert after(early, True, "new") != after(late, True, "")
    assert after(late, False, "new") == early.current


@pytest.mark.parametrize("forget", [False, True])
def test_weights_that_cannot_be_looked_at_begin_an_epoch_at_every_reset(forget: bool) -> None:
    epochs = Epochs("e")
    epochs.watched(False)
    seen = [epochs.current]
    for _ in range(3):
        epochs.reset(forget)
        seen.append(epochs.current)
    assert None not in seen
    assert len(set(seen)) == 4
    assert after(watched(), forget, None) not in seen  # a rank that could not say


def test_a_reset_before_anything_is_known() -> None:
    blind, watching = Epochs("e"), Epochs("e")
    for epochs in (blind, watching):
        epochs.reset(False)
        assert epochs.current is None
    blind.watched(False)
    assert blind.current
    watching.watched(True)
    assert watching.current is None
    watching.looked(1, [""])
    assert watching.current == ""


def test_an_answer_about_an_earlier_reset_does_not_count() -> None:
    epochs = watched()
    epochs.reset(False)
    epochs.reset(False)
    epochs.looked(1, ["before the second update"])
    assert epochs.current is None
    epochs.looked(2, [""])
    assert epochs.current == ""
    epochs.looked(2, ["late"])
    assert epochs.current == ""
