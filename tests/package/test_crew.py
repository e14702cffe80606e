"""Who makes which shard on a cluster whose actors and machines die, without Ray's processes."""

from types import SimpleNamespace

import pytest

from diffusion_training.cluster import crew as module
from diffusion_training.cluster.connection import is_lost_machine

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -r requirements-ray.txt")


class Cluster:
    """Replaces Ray. Returns the test's answers, and records which encoders are ended."""

    def __init__(self):
        self.encoders, self.ended, self.answers = [], [], {}

    reason = "it is lost"

    def start_encoder(self):
        number = len(self.encoders)
        shards = SimpleNamespace(remote=lambda shard: (number, shard[0]))
        started = SimpleNamespace(remote=lambda: (number, None))
        self.encoders.append(SimpleNamespace(make=shards, __ray_ready__=started))
        return self.encoders[-1], number

    def get(self, ref):
        if ref not in self.answers:
            raise ray.exceptions.RayActorError(None, self.reason)
        return self.answers[ref]


@pytest.fixture
def crew(monkeypatch):
    """crew(count, shards): a `Crew` of so many encoders, and its cluster."""

    def make(count, shards):
        cluster = Cluster()
        monkeypatch.setattr(ray.util, "remove_placement_group", cluster.ended.append)
        monkeypatch.setattr(ray, "get", cluster.get)
        return module.Crew(
            dict.fromkeys(range(shards), ()), cluster.start_encoder, count, 3
        ), cluster

    return make


def turn(crew):
    """A turn of `make_shards`. Returns the calls, (encoder, shard or None), that are unanswered."""
    crew.hand_out()
    crew.resize()
    return sorted(list_calls(crew), key=str)


def list_calls(crew):
    return {ref: member for member in crew.members for ref in member.calls}


def read(crew, ref):
    member = list_calls(crew).get(ref)  # None if the encoder has died
    return member and crew.read_answer(member, ref)


def test_crew_gives_shards_to_ready_encoders_and_ends_idle_ones(crew):
    crew, cluster = crew(3, 8)
    assert turn(crew) == [(0, None), (1, None), (2, None)]
    cluster.answers = {(0, None): True, (1, None): True}
    assert read(crew, (0, None)) is read(crew, (1, None)) is None
    # One shard is kept for each encoder that may still answer.
    of_two = [(0, 0), (0, 2), (0, 4), (1, 1), (1, 3), (1, 5), (2, None)]
    assert turn(crew) == of_two and crew.left == [6, 7]
    cluster.answers |= {(0, shard): {} for shard in (0, 2, 4)}
    assert [read(crew, (0, shard)) for shard in (0, 2, 4)] == [(0, {}), (2, {}), (4, {})]
    assert turn(crew) == [(0, 6), (1, 1), (1, 3), (1, 5), (2, None)] and crew.left == [7]
    cluster.answers |= {(0, 6): {}, (0, 7): {}}
    read(crew, (0, 6))
    assert turn(crew) == [(0, 7), (1, 1), (1, 3), (1, 5)] and cluster.ended == [2]
    read(crew, (0, 7))
    assert turn(crew) == [(1, 1), (1, 3), (1, 5)] and cluster.ended == [2, 0]


def test_crew_gives_shards_of_a_lost_node_to_other_encoders(crew):
    """They are tried again one at a time. The new encoder may never get a place.

    One that dies at its start four times ends the run.
    """
    crew, cluster = crew(2, 5)
    turn(crew)
    cluster.answers = {(0, None): True, (1, None): True}
    read(crew, (0, None)), read(crew, (1, None))
    assert turn(crew) == [(0, 0), (0, 2), (0, 4), (1, 1), (1, 3)]
    assert read(crew, (1, 1)) is read(crew, (1, 3)) is None
    assert turn(crew) == [(0, 0), (0, 2), (0, 4), (2, None)] and crew.left == [1, 3]
    cluster.answers |= {(0, shard): {} for shard in (0, 2, 4, 1, 3)}
    [read(crew, (0, shard)) for shard in (0, 2, 4)]
    assert turn(crew) == [(0, 1), (2, None)]
    for number in (2, 3, 4):
        assert read(crew, (number, None)) is None
        assert turn(crew) == [(0, 1), (number + 1, None)]
    with pytest.raises(SystemExit, match="not be started: its process died 4 times, .* is lost"):
        read(crew, (5, None))
    assert read(crew, (0, 1)) == (1, {}) and turn(crew) == [(0, 3)] and crew.left == []
    assert read(crew, (0, 3)) == (3, {}) and turn(crew) == []


# as Ray describes it; tests/scripts/test_precompute_latents_ray.py asks Ray itself
TAKEN = "The actor died unexpectedly.\nThe actor died because its node has died. Node Id: 5f"


def test_crew_does_not_count_machines_that_are_taken_away_as_deaths(crew, monkeypatch):
    """Neither of shards nor of encoders that start, up to a limit for a shard that ends machines.

    Only after a death are shards tried one at a time.
    """
    crew, cluster = crew(1, 2)
    cluster.reason = TAKEN
    for number in range(10):
        assert turn(crew) == [(number, None)]
        if number % 2:
            cluster.answers[number, None] = True
            read(crew, (number, None))
            assert turn(crew) == [(number, 0), (number, 1)]
            assert read(crew, (number, 1)) is None and crew.left == [0, 1]
        else:
            assert read(crew, (number, None)) is None
    assert not crew.tries and crew.losses == {0: 5, 1: 5, None: 5}
    monkeypatch.setattr(module, "LOSSES", 6)
    cluster.answers[10, None] = True
    turn(crew)
    read(crew, (10, None))
    turn(crew)
    assert read(crew, (10, 1)) == (1, {"failed": "its machine was lost 6 times"})


@pytest.mark.parametrize("error", ["preempted", "node", "object", "process", "actor"])
def test_lost_machines_are_told_from_deaths(error):
    exceptions = ray.exceptions
    errors = {
        "preempted": exceptions.RayActorError(preempted=True),
        "node": exceptions.NodeDiedError("it is gone"),
        "object": exceptions.ObjectLostError("ff", None, ""),
        "process": exceptions.WorkerCrashedError(),
        "actor": exceptions.ActorDiedError(),
    }
    assert is_lost_machine(errors[error]) == (error in ("preempted", "node", "object"))
