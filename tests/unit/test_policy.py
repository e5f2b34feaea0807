"""The registry of policy versions: who gets which, and which may leave."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_server.errors import ServeError
from vllm_server.policy import Lease, PolicyRegistry, Version
from vllm_server.protocol import parse_version


def registry(keep: int = 2, capacity: int = 4) -> PolicyRegistry:
    return PolicyRegistry(served_name="base", lora_name="policy", aliases=("also",), keep=keep, capacity=capacity)


def publish(held: PolicyRegistry, version: int | None = None, *, name: str | None = None) -> Version:
    name, number = held.name_for(name, version)
    ready = held.reserve(name, number, adapter_id=held.load_count + 1, path=f"/adapters/{name}", now=1.0)
    held.activate(ready)
    return ready


def test_before_the_first_publish_the_base_model_answers_as_version_0() -> None:
    held = registry()
    assert held.resolve() is held.base
    assert held.resolve(policy_version=0) is held.base
    assert (held.newest.version, held.newest.name) == (0, "base")


def test_a_base_model_that_counts_as_a_later_version_is_pinned_by_it_and_adapters_go_on_above() -> None:
    held = PolicyRegistry(served_name="base", lora_name="policy", keep=2, capacity=4, base_version=6)
    assert held.newest.version == 6 and held.resolve(policy_version=6) is held.base
    with pytest.raises(ServeError) as refused:
        held.resolve(policy_version=0)
    assert (refused.value.field, refused.value.got) == ("policy_version", "0")
    assert publish(held).name == "policy-v7" and held.newest.version == 7
    assert held.resolve(policy_version=6) is held.base


def test_a_request_knows_with_which_version_of_a_base_that_is_written_it_began_and_ended() -> None:
    held = registry()
    lease = Lease(held.resolve(), held.base.version)
    assert (lease.began_with, lease.ended_with) == (0, None)
    held.rebase(3)
    assert (lease.began_with, lease.ended_with) == (0, 3)
    assert held.resolve(policy_version=3) is held.base and held.name_for(None, None) == ("policy-v4", 4)
    with pytest.raises(ServeError):
        held.resolve(policy_version=0)
    for number in (-1, 2):  # after a proof, and by a resumed run
        held.rebase(number)
        assert held.newest.version == number
    assert held.name_for(None, None) == ("policy-v4", 4), "no name is used twice"


@pytest.mark.parametrize("model", [None, "base", "policy", "also"])
def test_a_request_that_names_no_version_gets_the_newest(model: str | None) -> None:
    held = registry()
    publish(held, 1)
    second = publish(held, 2)
    assert held.resolve(model) is second
    assert held.knows(model)


def test_a_request_may_pin_a_version_by_name_or_number() -> None:
    held = registry()
    first = publish(held, 1)
    publish(held, 2)
    assert held.resolve("policy-v1") is first
    assert held.resolve(policy_version=1) is first
    assert held.resolve("policy-v1", 1) is first


def test_one_that_is_served_by_name_only_is_never_the_newest() -> None:
    held = registry(keep=1)
    first = publish(held, 1)
    trial = held.reserve("trial", 7, adapter_id=9, path="/adapters/trial", now=1.0, by_name_only=True)
    held.activate(trial)
    assert held.resolve() is held.resolve("policy") is first
    assert held.resolve("trial") is trial
    with pytest.raises(ServeError):
        held.resolve(policy_version=7)
    assert not first.retired, "a trial pushed a version out of the window"
    assert publish(held).version == 2, "a trial's number counted"
    assert not trial.retired


@pytest.mark.parametrize("pin", [{"model": "policy-v9"}, {"policy_version": 9}])
def test_a_pin_on_a_version_that_is_not_there_names_those_that_are(pin: dict[str, str]) -> None:
    held = registry()
    publish(held, 1)
    with pytest.raises(ServeError) as refused:
        held.resolve(**pin)  # pyright: ignore[reportArgumentType]
    assert refused.value.wanted.endswith(" base, policy-v1")
    assert [refused.value.field] == list(pin)
    assert not held.knows("policy-v9")
    assert held.knows("policy-v1")
    assert refused.value.status == 404


def test_once_version_0_was_an_adapter_the_base_model_does_not_answer_for_it() -> None:
    held = registry(keep=1, capacity=2)
    assert publish(held, 0) is held.resolve(policy_version=0)
    publish(held, 1)
    with pytest.raises(ServeError) as refused:
        held.resolve(policy_version=0)
    assert (refused.value.field, refused.value.got) == ("policy_version", "0")


def test_names_and_numbers_follow_from_each_other() -> None:
    held = registry()
    assert held.name_for(None, None) == ("policy-v1", 1)
    assert held.name_for(None, 5) == ("policy-v5", 5)
    assert held.name_for("policy-v7", None) == ("policy-v7", 7)
    assert held.name_for("policy", None) == ("policy-v1", 1)
    assert held.name_for("step_3", 3) == ("step_3", 3)
    publish(held, 5)
    assert held.name_for(None, None) == ("policy-v6", 6)
    assert held.name_for("mine", None) == ("mine", 6)


@pytest.mark.parametrize(
    ("ask", "status", "field"),
    [
        (lambda held: held.resolve("policy-v1", 2), 422, "policy_version"),
        (lambda held: held.name_for("policy-v3", 4), 422, "version"),
        (lambda held: held.name_for(None, -1), 422, "version"),
        (lambda held: held.reserve("v3", 3, adapter_id=3, path="/adapters/policy-v1", now=0.0), 409, "adapter_path"),
    ],
    ids=["version of another name", "number of another name", "below 0", "path that is served"],
)
def test_registry_refuses_what_contradicts_itself(
    ask: Callable[[PolicyRegistry], object], status: int, field: str
) -> None:
    held = registry()
    publish(held, 1)
    publish(held, 2)
    with pytest.raises(ServeError) as refused:
        ask(held)
    assert (refused.value.status, refused.value.field) == (status, field)


def test_a_name_is_never_used_twice_even_after_its_version_left() -> None:
    held = registry(keep=1, capacity=2)
    publish(held, 1)
    publish(held, 2)
    for version in held.removable():
        held.remove(version)
    with pytest.raises(ServeError) as refused:
        held.name_for(None, 1)
    assert (refused.value.status, refused.value.field, refused.value.got) == (409, "adapter_name", "policy-v1")
    assert refused.value.fix.endswith(" 3")


def test_a_name_whose_load_failed_can_be_used_again() -> None:
    held = registry()
    name, number = held.name_for(None, 1)
    held.reserve(name, number, adapter_id=1, path="/a", now=0.0)
    assert held.name_for(None, 1) == ("policy-v1", 1)
    assert held.newest is held.base


def test_withdrawing_the_newest_brings_back_the_one_before() -> None:
    held = registry()
    first, second = publish(held, 1), publish(held, 2)
    assert held.retire() is second
    assert held.newest is first
    assert held.retire("policy-v1") is first
    assert held.retire("policy-v1") is first  # again
    held.remove(first)
    assert held.retire("policy-v1") is None  # and again
    assert held.newest is held.base
    assert held.retire() is None


def test_room_is_made_from_what_nobody_uses_and_never_costs_the_newest() -> None:
    held = registry(keep=2, capacity=3)
    first, second, third = publish(held, 1), publish(held, 2), publish(held, 3)
    held.begin(second)
    assert held.make_room() is True  # the first has retired already
    held.remove(first)
    assert held.make_room() is True  # two of three places are taken
    fourth = held.reserve(*held.name_for(None, 4), adapter_id=4, path="/4", now=0.0)
    held.activate(fourth)
    held.begin(third)
    assert held.make_room() is False  # two are used, and the newest stays
    assert not fourth.retired
    held.end(third)
    assert held.make_room() is True
    assert held.removable() == [third]


def test_room_is_not_made_from_the_newest_nor_from_one_that_is_served_by_name_only() -> None:
    held = registry(keep=1, capacity=2)
    newest = publish(held, 1)
    trial = held.reserve("trial", 7, adapter_id=9, path="/adapters/trial", now=1.0, by_name_only=True)
    held.activate(trial)
    assert held.make_room() is False
    assert not (newest.retired or trial.retired)
    held.retire("trial")
    assert held.make_room() is True


@pytest.mark.parametrize("keep", [0, 4])
def test_the_window_must_leave_a_place_for_the_next_version(keep: int) -> None:
    with pytest.raises(ValueError, match=rf"keep: got {keep}\b.*\b1 to 3"):
        registry(keep=keep, capacity=4)


class Life(RuleBasedStateMachine):
    """Any order of publishes, requests, withdrawals and sweeps."""

    def __init__(self) -> None:
        super().__init__()
        self.held = registry(keep=2, capacity=4)
        self.names: list[str] = []
        self.running: list[Version] = []

    @rule()
    def publish(self) -> None:
        if self.held.make_room():
            self.sweep()
            self.names.append(publish(self.held).name)

    @rule(pin=st.none() | st.integers(0, 8))
    def begin(self, pin: int | None) -> None:
        try:
            version = self.held.resolve(policy_version=pin)
        except ServeError as refused:
            assert refused.status == 404
            return
        assert pin in (None, version.version)
        self.held.begin(version)
        self.running.append(version)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        version = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        free = self.held.end(version)
        assert free == (version.retired and version not in self.running)

    @rule()
    def withdraw(self) -> None:
        self.held.retire()

    @rule()
    def sweep(self) -> None:
        for version in self.held.removable():
            assert version not in self.running
            self.held.remove(version)

    @invariant()
    def what_runs_is_held(self) -> None:
        assert {v for v in self.running if v is not self.held.base} <= set(self.held.versions)
        assert sum(v.in_flight for v in [*self.held.versions, self.held.base]) == len(self.running)

    @invariant()
    def the_engine_is_never_asked_for_more_than_it_holds(self) -> None:
        assert len(self.held.versions) <= self.held.capacity

    @invariant()
    def there_is_always_a_newest_in_the_engine(self) -> None:
        assert self.held.newest is self.held.base or self.held.newest in self.held.versions

    @invariant()
    def names_are_new_and_in_order(self) -> None:
        numbers = [parse_version(name, "policy") for name in self.names]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len([v for v in self.held.versions if not v.retired]) <= self.held.keep


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
