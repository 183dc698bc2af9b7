"""What a server may take: the host's memory, the cgroups around it, and what is said about both."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lamina import protocol
from lamina.client import Client
from lamina.devices.host import HostWorkerDevice
from lamina.errors import ServerUnavailableError, SettingsError
from lamina.server.main import Server
from lamina.server.memory import HEADROOM_BYTES, Limit, arena_bytes, memory_limits
from lamina.settings import ClientSettings, ServerSettings, Share
from tests.support.wait import eventually

GIB, MIB = 1 << 30, 1 << 20
V1_UNLIMITED = 9_223_372_036_854_771_712
Write = Callable[[dict[str, object]], None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes files below a root of /proc and /sys that is the test's own."""

    def write(files: dict[str, object]) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    return write


def meminfo(available: int, total: int = 24 * GIB, hugetlb: int = 0) -> str:
    return (
        f"MemTotal: {total >> 10} kB\nMemAvailable: {available >> 10} kB\n"
        f"HugePages_Total: 0\nHugetlb: {hugetlb >> 10} kB"
    )


def available(limits: list[Limit]) -> list[int]:
    return [limit.available_bytes for limit in limits]


# What may be taken.


def test_a_host_without_cgroups_may_take_what_is_available(tmp_path: Path, write: Write) -> None:
    write({"proc/meminfo": meminfo(21 * GIB)})
    (limit,) = memory_limits(tmp_path)
    assert limit.available_bytes == 21 * GIB
    assert limit.words == "this host has 21 GiB available (of 24 GiB)"


def test_memory_reserved_as_huge_pages_is_named(tmp_path: Path, write: Write) -> None:
    write({"proc/meminfo": meminfo(3 * GIB, hugetlb=20 * GIB)})
    (limit,) = memory_limits(tmp_path)
    assert "20 GiB of it in reserved huge pages" in limit.words


def test_without_proc_nothing_is_known_and_a_size_is_taken(tmp_path: Path) -> None:
    assert memory_limits(tmp_path) == []
    assert arena_bytes(GIB, []) == GIB
    with pytest.raises(SettingsError, match="80% of the memory was asked for"):
        arena_bytes(Share(0.8), [])


def test_cgroup_v2_counts_what_is_used_but_not_the_page_cache(tmp_path: Path, write: Write) -> None:
    group = "sys/fs/cgroup/pods/a"
    write(
        {
            "proc/self/cgroup": "0::/pods/a",
            "proc/meminfo": meminfo(20 * GIB),
            f"{group}/memory.max": 4 * GIB,
            f"{group}/memory.high": "max",
            f"{group}/memory.current": 3 * GIB,
            f"{group}/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file 7",
        }
    )
    limits = memory_limits(tmp_path)
    assert available(limits) == [20 * GIB, 3 * GIB]
    assert limits[1].words == "the cgroup /pods/a allows 3 GiB more (of 4 GiB)"


def test_the_tightest_cgroup_on_the_way_up_counts(tmp_path: Path, write: Write) -> None:
    top = "sys/fs/cgroup"
    write({"proc/self/cgroup": "0::/pods/a/inner", "proc/meminfo": meminfo(20 * GIB)})
    for group, limit, used in (
        (f"{top}/pods", 6 * GIB, 5 * GIB),  # others of the pod use most of it
        (f"{top}/pods/a", 4 * GIB, 0),
        (f"{top}/pods/a/inner", "max", 0),
    ):
        write({f"{group}/memory.max": limit, f"{group}/memory.current": used})
    assert available(memory_limits(tmp_path)) == [20 * GIB, GIB]


def test_a_soft_limit_of_cgroup_v2_counts_too(tmp_path: Path, write: Write) -> None:
    group = "sys/fs/cgroup/a"
    write({"proc/self/cgroup": "0::/a", f"{group}/memory.max": 4 * GIB})
    write({f"{group}/memory.high": GIB, f"{group}/memory.current": 0})
    assert available(memory_limits(tmp_path)) == [GIB]


def test_cgroup_v1_has_its_own_files_and_number_for_no_limit(tmp_path: Path, write: Write) -> None:
    top = "sys/fs/cgroup/memory"
    write({"proc/self/cgroup": "9:cpu,cpuacct:/\n4:memory:/docker/a\n0::/"})
    write({f"{top}/memory.limit_in_bytes": V1_UNLIMITED, f"{top}/memory.usage_in_bytes": GIB})
    assert memory_limits(tmp_path) == []
    write(
        {
            f"{top}/docker/a/memory.limit_in_bytes": 2 * GIB,
            f"{top}/docker/a/memory.usage_in_bytes": GIB,
            f"{top}/docker/a/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB // 2}",
        }
    )
    assert available(memory_limits(tmp_path)) == [3 * GIB // 2]


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/docker/a", ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current")),
        (
            "4:memory:/docker/a",
            (
                "sys/fs/cgroup/memory/memory.limit_in_bytes",
                "sys/fs/cgroup/memory/memory.usage_in_bytes",
            ),
        ),
    ],
    ids=["v2", "v1"],
)
def test_a_containers_own_cgroup_is_mounted_on_top(
    tmp_path: Path, write: Write, line: str, files: tuple[str, str]
) -> None:
    write({"proc/self/cgroup": line, files[0]: GIB, files[1]: GIB // 4})
    assert available(memory_limits(tmp_path)) == [3 * GIB // 4]


# What is asked for.

HOST = Limit(21 * GIB, "this host has 21 GiB available (of 24 GiB)", "free memory")
CGROUP = Limit(GIB, "the cgroup /a allows 1 GiB more (of 1 GiB)", "raise the cgroup's limit")


def test_what_is_left_is_the_tightest_limit_without_what_the_server_needs() -> None:
    most = CGROUP.arena_bytes
    assert GIB - 2 * HEADROOM_BYTES < most <= GIB - HEADROOM_BYTES
    assert arena_bytes(most, [HOST, CGROUP]) == arena_bytes(Share(1), [HOST, CGROUP]) == most
    assert arena_bytes(Share(0.5), [HOST, CGROUP]) == most // 2
    with pytest.raises(SettingsError):
        arena_bytes(most + 1, [HOST, CGROUP])


def test_an_arena_that_does_not_fit_is_refused_with_all_figures_and_what_fits() -> None:
    with pytest.raises(SettingsError) as refusal:
        arena_bytes(2 * GIB, [HOST, CGROUP])
    assert str(refusal.value) == (
        "an arena of 2 GiB was asked for; this host has 21 GiB available (of 24 GiB), the cgroup "
        "/a allows 1 GiB more (of 1 GiB), and the server itself needs 64 MiB. Use --arena "
        f"{CGROUP.arena_bytes >> 20}MiB or less, or 80%; or raise the cgroup's limit"
    )


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"an arena of 80% was .*\. Free memory"):
        arena_bytes(Share(0.8), [HOST._replace(available_bytes=HEADROOM_BYTES)])


def test_a_server_asks_before_it_takes_anything(socket_path: Path) -> None:
    with pytest.raises(SettingsError, match="an arena of 10 TiB was asked for; this host has"):
        Server(ServerSettings(socket=socket_path, arena_bytes=10 << 40))
    assert not socket_path.parent.exists()


# A cgroup of 1 GiB.


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of 1 GiB below this process's own."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    try:
        own = next(
            Path("/sys/fs/cgroup") / ("memory" if names else "") / path.lstrip("/")
            for _, names, path in lines
            if "memory" in names.split(",") or not names
        )
        if not own.exists():  # a container's own group is mounted on top
            own = Path("/sys/fs/cgroup/memory")
        group = Path(tempfile.mkdtemp(prefix="lamina-", dir=own))
    except (OSError, StopIteration) as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    files = [group / name for name in ("memory.max", "memory.limit_in_bytes")]
    limits = [file for file in files if file.exists()]
    try:
        if not limits:
            pytest.skip("cgroups made here cannot limit memory")
        limits[0].write_text(str(GIB))
        yield group
    finally:
        group.rmdir()


def serve_in(cgroup: Path, socket: Path, *options: str) -> subprocess.Popen[str]:
    """`lamina serve`, moved into the cgroup before it becomes that."""
    move = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); "
    become = "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
    serve = ["-m", "lamina.cli", "serve", "--socket", str(socket), *options]
    return subprocess.Popen(
        [sys.executable, "-c", move + become, str(cgroup / "cgroup.procs"), *serve],
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_cgroup_refuses_what_it_does_not_allow(cgroup: Path, socket_path: Path) -> None:
    server = serve_in(cgroup, socket_path, "--arena", "2GiB")
    _, said = server.communicate(timeout=60)
    assert server.returncode == 2, said
    assert "an arena of 2 GiB was asked for; this host has " in said
    assert f"/{cgroup.name} allows " in said
    assert "more (of 1 GiB)" in said


@pytest.mark.parametrize("share", ["80%", "100%"])
def test_a_share_of_a_cgroup_is_filled_and_nobody_is_killed(
    cgroup: Path, socket_path: Path, share: str
) -> None:
    server = serve_in(cgroup, socket_path, "--arena", share)
    client = Client(ClientSettings(socket=socket_path), HostWorkerDevice(), "test")
    values: dict[str, int | float] = {}

    def is_filled() -> bool:
        assert server.poll() is None, "killed"
        try:
            client.connect()
        except ServerUnavailableError:
            return False
        stats = client.ask(protocol.GetStats)
        assert isinstance(stats, protocol.Stats)
        values.update(stats.values)
        return values["arena_ready_bytes"] == values["arena_capacity_bytes"]

    try:
        eventually(is_filled)
        assert 0.7 * GIB < values["arena_capacity_bytes"] < GIB - HEADROOM_BYTES
    finally:
        client.close()
        server.terminate()
        _, said = server.communicate(timeout=60)
    assert server.returncode == 0, said
