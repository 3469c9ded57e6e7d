"""What to do about parts that failed at every try without an answer about their rows: pure decisions, no effects.

Such a part is a suspect. It waits for a witness: another part that the endpoint accepts afterwards. With a witness the
endpoint works, so the part is to blame: it is halved, and a single row is set aside. Without a witness the endpoint may
be down, and none of the rows is to blame: so no row is set aside for an endpoint that fails every request.

Halves have other keys. A lake identifies rows by their numbers, and is asked to skip a row before the row is set aside.
Other endpoints need `split_unanswered`; if nothing else is left to send, an accepted part is sent again under its key:
the control. Rows of the quarantine that are sent again go back there if they get no answer; if no answer spoke about
any of them, they keep their reason, and the try fails. http/destination.py gathers the facts, and carries out what is
decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

# How often a part is halved only to get a part to compare with, over all runs.
PROBES_MAX = 4
# After so many resent rows without an answer about any of them, the endpoint counts as down, and the try ends.
SILENT_MAX = 20


@dataclass(frozen=True)
class Suspect:
    """A part that waits for a witness, by its first row."""

    first: int
    rows: int
    # How many parts were accepted in this try when it began to wait, and when it was cut or halved.
    accepted_before: int
    accepted_when_made: int
    # It is a half of a part that failed, or an earlier run noted it; how often it was halved only to compare.
    is_noted: bool = False
    probes: int = 0


@dataclass(frozen=True)
class Situation:
    """What a try knows when it decides about its suspects."""

    # Parts that the endpoint accepted in this try.
    accepted: int
    # How many suspects wait at most: each holds the memory of a body.
    suspects_max: int
    is_lake: bool
    # Halves have other keys: only a lake, or an endpoint whose owner allows it, gets them.
    may_split: bool
    # Rows of the quarantine that are sent again.
    is_retry: bool
    is_resumed: bool
    # Nothing is cut, ready or in flight.
    is_idle: bool
    has_control: bool
    # A part was halved only to compare, in this try.
    is_probed: bool
    # For resent rows: whether the endpoint answered about one, and how many got no answer since.
    is_heard: bool
    silent: int

    @property
    def may_be_lake(self) -> bool:
        """Whether the destination is unknown so far: no part was accepted, so it has not identified itself."""
        return not self.accepted and not self.is_lake

    @property
    def goes_back(self) -> bool:
        """Rows of the quarantine that get no answer go back there; a lake is asked to skip them first."""
        return self.is_retry and self.may_split and not self.is_lake

    def holds_back(self, suspects: int) -> bool:
        """A first run sends nothing more until it knows whether a part that failed may be halved.

        Nor does it send more rows again while several of them failed: those in flight may show that the endpoint works.
        """
        if self.goes_back:
            return suspects >= self.suspects_max
        return bool(suspects) and not self.may_split and not self.is_resumed


@dataclass(frozen=True)
class EndRun:
    """The run ends because of this part."""

    suspect: Suspect


@dataclass(frozen=True)
class Divide:
    """These are halved; a single row is set aside."""

    suspects: tuple[Suspect, ...]


@dataclass(frozen=True)
class Probe:
    """This one is halved only to get parts to compare with."""

    suspect: Suspect


@dataclass(frozen=True)
class SendControl:
    """A part that was accepted is sent again, to test whether the endpoint works."""


@dataclass(frozen=True)
class GiveBack:
    """All of them go back into quarantine. `to_blame`: with the answer that they got now; else the try ends."""

    to_blame: bool


Decision: TypeAlias = EndRun | Divide | Probe | SendControl | GiveBack


def judge(now: Situation, suspects: Sequence[Suspect]) -> EndRun | Divide:
    """After an answer: which suspects are to blame, because another part was accepted since they began to wait."""
    if not now.may_split and not now.may_be_lake:
        return EndRun(suspects[0])
    return Divide(tuple(one for one in suspects if now.accepted > one.accepted_before))


def must_decide(now: Situation, suspects: int) -> bool:
    """Whether no more suspects can wait: so many failures in a row are the endpoint's fault."""
    return suspects >= now.suspects_max and not now.goes_back


def decide_without_witness(now: Situation, suspects: Sequence[Suspect]) -> Decision:
    """Nothing was accepted since these failed: the endpoint may be down, and none of their rows is to blame.

    A part of several rows is halved nevertheless if others were accepted in this run since it was made: that sets
    nothing aside, and each half is a witness for the other.
    """
    if not now.may_split:
        return EndRun(suspects[0])
    if now.goes_back:
        return GiveBack(to_blame=now.is_heard and now.silent + len(suspects) <= SILENT_MAX)
    worth = tuple(one for one in suspects if _may_divide(now, one, len(suspects)))
    if worth:
        return Divide(worth)
    if now.has_control:
        return SendControl()
    first = min(suspects, key=lambda one: one.first)
    may_probe = now.is_resumed and not now.is_probed and first.rows > 1 and first.probes < PROBES_MAX
    return Probe(first) if may_probe else EndRun(first)


def _may_divide(now: Situation, one: Suspect, suspects: int) -> bool:
    """Whether to continue with a part that failed, although nothing was accepted since it was sent.

    The last single row for a lake: the lake is asked to skip it, which a lake that is down cannot do.
    """
    if now.is_retry:
        return suspects < now.suspects_max  # they are in quarantine, and stay there
    is_accepted = now.accepted > one.accepted_when_made
    if one.rows > 1:
        return is_accepted
    return suspects == 1 and now.is_idle and now.is_lake and (is_accepted or one.is_noted)
