"""Whom a client trusts, and that it says nothing to anybody else."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from lamina import protocol
from lamina.board import Board
from lamina.client.connection import Connection
from lamina.client.trust import check_server
from lamina.errors import ServerUnavailableError, UntrustedServerError
from tests.client.test_link import free_descriptors
from tests.e2e.strangers import open_fds
from tests.support.users import STRANGER, StrangersServer, needs_root

ME = os.geteuid()
SOMEBODY = ME + 1


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(0)
    yield board
    board.close()


@pytest.fixture
def listening(socket_path: Path) -> Iterator[socket.socket]:
    socket_path.parent.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.fspath(socket_path))
        listening.listen(8)
        yield listening


@pytest.mark.parametrize("mode", [0o700, 0o711, 0o755, 0o500])
def test_a_server_of_our_own_in_a_directory_that_only_we_write(
    socket_path: Path, mode: int
) -> None:
    socket_path.parent.mkdir()
    socket_path.parent.chmod(mode)
    for server_uid in (None, SOMEBODY):
        check_server(socket_path, ME, server_uid)


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_a_directory_that_others_write_is_not_trusted(socket_path: Path, mode: int) -> None:
    """Not even a sticky one: somebody else's server may have been there first."""
    socket_path.parent.mkdir()
    socket_path.parent.chmod(mode)
    with pytest.raises(UntrustedServerError, match=r"can be written by others.*of its own") as no:
        check_server(socket_path, ME, None)
    assert "chmod" not in str(no.value)


def test_a_server_of_another_user_is_trusted_only_by_name(socket_path: Path) -> None:
    with pytest.raises(UntrustedServerError) as no:
        check_server(socket_path, SOMEBODY, None)
    said = str(no.value)
    assert f"is of user {SOMEBODY}, not of user {ME}. " in said
    assert (
        "set lamina.server_uid (--server-uid on the command line) if that user is to be trusted"
        in said
    )
    with pytest.raises(UntrustedServerError, match=f"not of user {ME} or {SOMEBODY + 1}"):
        check_server(socket_path, SOMEBODY, SOMEBODY + 1)
    check_server(Path("/proc/lamina.sock"), SOMEBODY, SOMEBODY)  # in a directory of root's


@needs_root
def test_a_directory_of_a_third_user_is_not_trusted(socket_path: Path) -> None:
    socket_path.parent.mkdir()
    os.chown(socket_path.parent, STRANGER, STRANGER)
    check_server(socket_path, STRANGER, STRANGER)
    with pytest.raises(UntrustedServerError, match=f"belongs to user {STRANGER}, not to the serv"):
        check_server(socket_path, ME, None)


def test_who_is_not_trusted_is_told_nothing(
    listening: socket.socket, socket_path: Path, board: Board
) -> None:
    socket_path.parent.chmod(0o777)
    files = open_fds()
    with pytest.raises(UntrustedServerError):
        Connection(socket_path, board)
    assert open_fds() == files
    peer, _ = listening.accept()
    with peer:
        assert socket.recv_fds(peer, 1 << 16, 8)[:2] == (b"", [])


@needs_root
def test_a_strangers_server_is_told_nothing_unless_it_is_trusted_by_name(
    socket_path: Path, board: Board
) -> None:
    server = StrangersServer(socket_path)
    try:
        with pytest.raises(UntrustedServerError, match=f"is of user {STRANGER}, not of user {ME}"):
            Connection(socket_path, board)
        assert server.next_told() == ""
        connection = Connection(socket_path, board, server_uid=STRANGER)
        connection.close()
        connection.server.close()
        assert server.next_told() == protocol.preface().hex()
    finally:
        server.stop()


def test_descriptors_of_our_own_that_are_lacking_are_no_servers_fault(
    listening: socket.socket, socket_path: Path, board: Board
) -> None:
    """With the only one a socket is made; none is left to hold the server by."""
    with (
        free_descriptors(1),
        pytest.raises(ServerUnavailableError, match=r"this process has no file.*`ulimit -n`"),
    ):
        Connection(socket_path, board)
