"""Actors of Ray that make the missing shards of a data set, until all are made or one fails."""

import collections
import heapq
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from diffusion_training.cluster.connection import LOSSES, TRIES, is_lost_machine
from diffusion_training.errors.sentences import fail
from diffusion_training.errors.stop_signals import end_if_stopped


@dataclass(eq=False)
class Member:
    """An actor of the crew."""

    actor: Any
    group: Any
    deaths: int  # how often its process died before it had started
    # {Ray's reference: shard}. The first call asks only whether it has started: {reference: None}
    calls: dict[Any, int | None]


class Crew:
    """The encoders of a run and their shards.

    An encoder gets shards after it has started, so an encoder without a place delays nothing.

    missing: {number of a shard: what `make` of an encoder needs besides}.
    start_encoder: returns (the actor, its placement group).
    most: number of encoders, if the cluster has a place for them.
    depth: shards of an encoder at a time.
    """

    def __init__(
        self,
        missing: dict[int, Any],
        start_encoder: Callable[[], tuple[Any, Any]],
        most: int,
        depth: int,
    ) -> None:
        self.missing, self.start_encoder = missing, start_encoder
        self.most, self.depth = most, depth
        self.left = sorted(missing)  # a heap
        self.members: list[Member] = []
        self.tries: collections.Counter = collections.Counter()  # deaths per shard
        self.losses: collections.Counter = collections.Counter()  # machines lost with each shard

    def make_shards(self, show: Callable[[int, int], None]) -> Generator[tuple[int, dict]]:
        """Have the encoders make the missing shards.

        Yields (number, result of `make`) in any order. A shard whose process died TRIES times
        yields {"failed": reason}. show(number of encoders at work, number of those to come).
        """
        import ray

        try:
            while True:
                self.hand_out()
                self.resize()
                called = {ref: member for member in self.members for ref in member.calls}
                if not called:
                    return
                starting = sum(None in member.calls.values() for member in self.members)
                show(len(self.members) - starting, starting)
                done, _ = ray.wait(list(called), num_returns=len(called), timeout=0.5)
                end_if_stopped()
                for ref in done:
                    # An encoder that has died has no calls any more.
                    if ref in called[ref].calls and (made := self.read_answer(called[ref], ref)):
                        yield made
        finally:
            for member in list(self.members):
                self.stop(member)

    def hand_out(self) -> None:
        """Give shards to the encoders that have started."""
        ready = [member for member in self.members if None not in member.calls.values()]
        starting = len(self.members) - len(ready)
        for depth in range(self.depth):
            for member in ready:
                if not self.left or len(member.calls) != depth:
                    continue
                # Ray does not report which shard killed a process, so all shards that the process
                # had are tried again one at a time. Encoders that start will need a shard each.
                shards = [*member.calls.values(), self.left[0]]
                if depth and (len(self.left) <= starting or any(self.tries[n] for n in shards)):
                    continue
                shard = heapq.heappop(self.left)
                ref = member.actor.make.remote((shard, self.missing[shard]))
                member.calls[ref] = shard

    def resize(self) -> None:
        """End encoders that have no work, and start those that are missing."""
        idle = [member for member in self.members if set(member.calls.values()) <= {None}]
        for member in idle[len(self.left) :]:
            self.stop(member)
        room = self.most - len(self.members)
        for _ in range(min(room, len(self.left) - len(idle))):
            self.start()

    def start(self, deaths: int = 0) -> None:
        actor, group = self.start_encoder()
        self.members.append(Member(actor, group, deaths, {actor.__ray_ready__.remote(): None}))

    def stop(self, member: Member) -> None:
        """End an encoder to free its place; its shards go to others."""
        from ray.util import remove_placement_group

        remove_placement_group(member.group)
        self.members.remove(member)
        for shard in member.calls.values():
            if shard is not None:
                heapq.heappush(self.left, shard)
        member.calls = {}

    def read_answer(self, member: Member, ref: Any) -> tuple[int, dict] | None:
        """Read an answer; return (number of a shard, result) if the shard is done or failed."""
        import ray

        shard = member.calls[ref]
        try:
            result = ray.get(ref)
        except ray.exceptions.RayError as error:  # the process or the node died
            reason = str(error).strip().splitlines()[-1][:200]
            died = f"its process died {TRIES} times, out of memory? ({reason})"
            is_lost = is_lost_machine(error)
            (self.losses if is_lost else self.tries).update(member.calls.values())
            self.stop(member)
            if shard is None:
                if member.deaths + (not is_lost) == TRIES:
                    fail(f"an encoder could not be started: {died}; the same command resumes")
                self.start(member.deaths + (not is_lost))
            elif self.tries[shard] == TRIES:
                return shard, {"failed": died}
            elif self.losses[shard] == LOSSES:
                return shard, {"failed": f"its machine was lost {LOSSES} times"}
            return None
        del member.calls[ref]
        return None if shard is None else (shard, result)
