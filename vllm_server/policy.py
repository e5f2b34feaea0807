"""The versions of the policy that a server holds: which request gets which, and which may be removed.

A pure state machine without engine, clock or asyncio. The life cycle of one version:

    reserve ──▶ activate ──▶ (begin … end)* ──▶ retire ──▶ idle ──▶ remove
       └──▶ dropped, if its load fails            by the keep window, or by request

A name is never activated twice, because it is the key of the engine's caches. `removable` never returns a version with
in-flight requests.
"""

from dataclasses import dataclass

from vllm_server.errors import ServeError
from vllm_server.protocol import HIGHEST_VERSION, LONGEST_NAME, parse_version, version_name


@dataclass(eq=False)
class Version:
    """One version in the engine. `adapter_id` is the engine's key; the base model has id 0 and no path."""

    name: str
    version: int
    adapter_id: int
    path: str
    loaded_at: float
    slot: int = -1
    in_flight: int = 0
    served: int = 0
    writes: int = 0  # of its weights in place
    retired: bool = False
    by_name_only: bool = False  # only for requests that name it; never "the newest"


class Lease:
    """A request's hold on the version that answers it. The base model's weights may be written meanwhile."""

    def __init__(self, version: Version) -> None:
        self.version = version
        self.began_with = version.version
        self._writes = version.writes

    @property
    def ended_with(self) -> int | None:
        """Return the current number if the weights were written since the beginning, else None.

        The number may be the same: a proof writes other weights, and then the old ones.
        """
        return None if self.version.writes == self._writes else self.version.version


def check_version(version: int) -> None:
    """Raise a ServeError, 422, if the number is out of range."""
    if not 0 <= version <= HIGHEST_VERSION:
        raise ServeError(422, "version", version, f"0 to {HIGHEST_VERSION}", "count versions from 1")


@dataclass(kw_only=True, eq=False)
class PolicyRegistry:
    """Versions by name, in the order in which they were published."""

    served_name: str  # the base model's name, as clients use it
    lora_name: str  # versions are named `<lora_name>-v<N>`
    aliases: tuple[str, ...] = ()  # further names that mean "the newest version"
    keep: int  # how many versions stay loaded; older ones retire
    capacity: int  # how many adapters the engine can hold at once; more than `keep`, for the one being loaded
    base_version: int = 0  # the base model's version number
    load_count: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.keep < self.capacity:
            raise ValueError(f"keep: got {self.keep} of capacity {self.capacity}, wanted 1 to {self.capacity - 1}")
        self.base = Version(self.served_name, version=self.base_version, adapter_id=0, path="", loaded_at=0.0)
        self._newest_aliases = {self.served_name, self.lora_name, *self.aliases}
        self._live: dict[str, Version] = {}  # active and draining, oldest first
        self._used_names: set[str] = set()
        self._highest = self.base_version

    @property
    def newest(self) -> Version:
        """Return the version for requests that name none."""
        return next((v for v in reversed(self._live.values()) if not (v.retired or v.by_name_only)), self.base)

    @property
    def versions(self) -> list[Version]:
        """All adapters that the engine holds, oldest first."""
        return list(self._live.values())

    # ------------------------------------------------------------------------------------------- publishing

    def name_for(self, name: str | None, version: int | None) -> tuple[str, int]:
        """Return name and number of the next version, from those that the publisher gave.

        Raises:
            ServeError: the number is negative or too large or contradicts the name, or the name is invalid or was used.
        """
        if name in self._newest_aliases:
            name = None  # an alias such as "policy" asks for its next version
        if name is not None and (len(name) > LONGEST_NAME or not name.isprintable()):
            got = f"{name[:40]!r} ({len(name)} characters)"
            wanted = f"up to {LONGEST_NAME} characters that can be printed"
            raise ServeError(422, "adapter_name", got, wanted, "choose another name")
        named = parse_version(name, self.lora_name) if name is not None else None
        if version is None:
            version = self._highest + 1 if named is None else named
        elif named not in (None, version):
            raise ServeError(422, "version", version, f"{named}, as {name} says", "leave one of them out")
        check_version(version)
        name = name or version_name(self.lora_name, version)
        if name in self._used_names:
            wanted = "a name that this server has never used, since it is the key of caches"
            raise ServeError(409, "adapter_name", name, wanted, f"publish version {self._highest + 1}")
        return name, version

    def reserve(
        self, name: str, version: int, *, adapter_id: int, path: str, now: float, by_name_only: bool = False
    ) -> Version:
        """Return a version to load. `activate` it after the load, or drop it.

        Raise a ServeError, 409, if a loaded version came from the same path.
        """
        assert adapter_id > 0, "id 0 is the base model"
        assert name not in self._used_names, name
        holder = next((v for v in self._live.values() if v.path == path), None)
        if holder is not None:
            got, fix = f"{path}, from which {holder.name} is still served", "save this version to a new folder"
            raise ServeError(409, "adapter_path", got, "another folder for each version", fix)
        return Version(name, version, adapter_id, path, loaded_at=now, by_name_only=by_name_only)

    def activate(self, version: Version) -> None:
        """Make a loaded version the newest; versions outside the window retire.

        A version that is served by name only changes neither.
        """
        assert version.name not in self._used_names, version.name
        self._live[version.name] = version
        self._used_names.add(version.name)
        self.load_count += 1
        if version.by_name_only:
            return
        self._highest = max(self._highest, version.version)
        current = [v for v in self._live.values() if not (v.retired or v.by_name_only)]
        for old in current[: -self.keep]:
            old.retired = True

    def rebase(self, version: int) -> None:
        """Set the base model's version after its weights were changed in place."""
        self.base.version = version
        self.base.writes += 1
        self._highest = max(self._highest, version)

    def make_room(self) -> bool:
        """Retire idle versions, oldest first, until one more adapter fits after the `removable` ones are removed.

        Return False if too many versions have in-flight requests. Call again after some requests have ended.
        """
        staying = [v for v in self._live.values() if not (v.retired and v.in_flight == 0)]
        # The newest stays, because new requests get it until the next one is loaded. A version served by name only
        # stays, too: the client that loaded it unloads it.
        idle = [v for v in staying if v.in_flight == 0 and v is not self.newest and not v.by_name_only]
        for old in idle[: max(0, len(staying) - self.capacity + 1)]:
            old.retired = True
            staying.remove(old)
        return len(staying) < self.capacity

    # -------------------------------------------------------------------------------------------- requests

    def resolve(self, model: str | None = None, policy_version: int | None = None) -> Version:
        """Return the version for a request with this `model` and `policy_version` (None: not given).

        Raise a ServeError: 404, the server has no such version (any more), or 422, the two contradict each other.
        """
        by_name = None if model is None or model in self._newest_aliases else self._find(model)
        by_number = None if policy_version is None else self._find_number(policy_version)
        if by_name and by_number and by_name is not by_number:
            got = f"{policy_version} with model {model}"
            raise ServeError(422, "policy_version", got, f"{by_name.version}", "leave one of them out")
        return by_name or by_number or self.newest

    def knows(self, model: str | None) -> bool:
        """Return whether `resolve` decides about this name. It refuses that of a version which has retired."""
        return model is None or model in self._newest_aliases or model in self._live

    def begin(self, version: Version) -> None:
        """Count a request on `version`, which stays loaded until `end`."""
        assert version is self.base or version.name in self._live, version.name
        version.in_flight += 1
        version.served += 1

    def end(self, version: Version) -> bool:
        """Count the end of a request on `version`. Return whether the version may be removed now."""
        assert version.in_flight > 0, version.name
        version.in_flight -= 1
        return version.retired and version.in_flight == 0

    # --------------------------------------------------------------------------------------------- leaving

    def retire(self, name: str | None = None) -> Version | None:
        """Withdraw the version `name` (by default the newest). Return None if there is none to withdraw.

        Withdrawing a withdrawn name again is no error: a client may repeat the request after a lost answer. Raise a
        ServeError, 404, if there never was such a version.
        """
        if name in self._used_names and ((known := self._live.get(name or "")) is None or known.retired):
            return known
        version = self.newest if name is None or name in self._newest_aliases else self._find(name)
        if version is self.base:
            return None
        version.retired = True
        return version

    def removable(self) -> list[Version]:
        """Return retired versions without in-flight requests. Call `remove` for each that the engine has freed."""
        return [v for v in self._live.values() if v.retired and v.in_flight == 0]

    def remove(self, version: Version) -> None:
        """Forget a version that the engine no longer holds."""
        assert version.retired and version.in_flight == 0, version.name
        del self._live[version.name]

    # --------------------------------------------------------------------------------------------- helpers

    def _find(self, name: str) -> Version:
        version = self._live.get(name)
        if version is None or version.retired:
            raise self._not_served("model", name)
        return version

    def _find_number(self, number: int) -> Version:
        found = [v for v in self._live.values() if v.version == number and not (v.retired or v.by_name_only)]
        if found:
            return found[-1]
        if number == self.base.version and version_name(self.lora_name, number) not in self._used_names:
            return self.base
        raise self._not_served("policy_version", number)

    def _not_served(self, field: str, got: object) -> ServeError:
        names = [self.base.name, *(v.name for v in self._live.values() if not v.retired)]
        fix = "leave it out for the newest version, or raise --lora-keep-versions to keep more"
        return ServeError(404, field, got, f"one of {', '.join(names)}", fix)
