"""Settings: what is accepted, what is refused, and that the refusal says why."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.errors import SettingsError
from lamina.settings import (
    AUTO,
    MAX_SOCKET_PATH_BYTES,
    WHOLE,
    ClientSettings,
    ServerSettings,
    Share,
    check_socket_path,
    default_socket,
    parse_address,
    parse_arena,
    parse_bytes,
    parse_counts,
    parse_overlap,
    size_text,
)


@pytest.mark.parametrize(
    ("value", "layers_per_slice"),
    [
        (True, 1),
        (False, WHOLE),
        (0, WHOLE),
        (1, 1),
        (7, 7),
        ("true", 1),
        ("false", WHOLE),
        ("True", 1),
        ("FALSE", WHOLE),
        (" true ", 1),
        ("0", WHOLE),
        ("8", 8),
        (" 32 ", 32),
        ("007", 7),
    ],
)
def test_layerwise_overlap_accepts_bools_ints_and_decimal_strings(
    value: object, layers_per_slice: int
) -> None:
    got = parse_overlap(value)
    assert got == layers_per_slice
    assert type(got) is int
    parsed = ClientSettings.parse({"lamina.layerwise_overlap": value})
    assert parsed.layerwise_overlap == layers_per_slice


@pytest.mark.parametrize(
    "value",
    [
        -1,
        "-1",
        "+1",
        1.0,
        0.5,
        "1.0",
        "1e2",
        "0x8",
        "1_0",
        "",
        " ",
        "yes",
        "on",
        "none",
        "layers",
        None,
        [],
        [1],
        {},
        b"1",
        "²",
    ],
)
def test_layerwise_overlap_refuses_anything_else_and_says_what_to_use(value: object) -> None:
    for parse in (parse_overlap, lambda v: ClientSettings.parse({"lamina.layerwise_overlap": v})):
        with pytest.raises(SettingsError) as caught:
            parse(value)
        assert "layerwise_overlap" in caught.value.cause
        assert "true (one layer a slice), a number of layers, or false" in caught.value.remedy


@pytest.mark.parametrize("value", ["auto", "AUTO", " auto "])
def test_layerwise_overlap_auto_lets_a_policy_choose(value: str) -> None:
    parsed = ClientSettings.parse({"lamina.layerwise_overlap": value})
    assert parsed == ClientSettings()
    assert parsed.layerwise_overlap == AUTO


def test_settings_of_others_are_left_alone_and_none_gives_the_defaults() -> None:
    assert ClientSettings.parse({"vllm.x": 1, "laminate": 2}) == ClientSettings()


def test_every_setting_can_be_given_as_text() -> None:
    parsed = ClientSettings.parse(
        {
            "lamina.layerwise_overlap": "4",
            "lamina.release_after_slices": "0",
            "lamina.chunk_tokens": "128",
            "lamina.connect_timeout_ms": "1",
            "lamina.lookup_timeout_ms": "2",
            "lamina.retrieve_timeout_ms": "3",
            "lamina.store_timeout_ms": "6",
            "lamina.suspect_after_ms": "4",
            "lamina.reconnect_every_ms": "5",
        }
    )
    assert (parsed.layerwise_overlap, parsed.release_after_slices) == (4, 0)
    assert parsed.chunk_tokens == 128
    assert parsed.connect_timeout_ms == 1
    assert parsed.lookup_timeout_ms == 2
    assert parsed.retrieve_timeout_ms == 3
    assert parsed.store_timeout_ms == 6
    assert parsed.suspect_after_ms == 4
    assert parsed.reconnect_every_ms == 5


def test_the_environment_fills_in_what_an_engines_configuration_does_not_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Named(ClientSettings, frozen=True, kw_only=True):
        model_id: str = ""

    for name, value in {
        "SOCKET": "/run/lamina/lamina.sock",
        "LAYERWISE_OVERLAP": "true",
        "LOOKUP_TIMEOUT_MS": "7",
        "STORE_TIMEOUT_MS": "8",
        "MODEL_ID": "of another engine",
    }.items():
        monkeypatch.setenv(f"LAMINA_{name}", value)
    parsed = Named.parse({"lamina.lookup_timeout_ms": 9})
    assert parsed == Named(
        socket=Path("/run/lamina/lamina.sock"),
        layerwise_overlap=1,
        lookup_timeout_ms=9,
        store_timeout_ms=8,
    )
    monkeypatch.setenv("LAMINA_STORE_TIMEOUT_MS", "soon")
    with pytest.raises(SettingsError, match="store_timeout_ms"):
        ClientSettings.parse({})


def test_the_socket_can_be_given_as_text_as_an_engines_configuration_does() -> None:
    parsed = ClientSettings.parse({"lamina.socket": "/run/lamina/lamina.sock"})
    assert parsed.socket == Path("/run/lamina/lamina.sock")


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("lamina.layerwise_overlp", "lamina.layerwise_overlap"),
        ("lamina.layerwise-overlap", "lamina.layerwise_overlap"),
        ("lamina.sokcet", "lamina.socket"),
        ("lamina.lookup_timeout_s", "lamina.lookup_timeout_ms"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_one_that_was_meant(
    key: str, suggestion: str
) -> None:
    with pytest.raises(SettingsError, match=re.escape(f"{key!r}. Did you mean {suggestion}?")):
        ClientSettings.parse({key: 1})


def test_an_unknown_setting_like_no_other_is_refused_with_all_that_exist() -> None:
    with pytest.raises(SettingsError, match=r"no setting 'lamina\.zzzzzzzzz'") as caught:
        ClientSettings.parse({"lamina.zzzzzzzzz": 1})
    for name in ClientSettings.__struct_fields__:
        assert f"lamina.{name}" in caught.value.remedy


@pytest.mark.parametrize("value", ["soon", [], {}, "1.5", 1.5])
def test_a_malformed_setting_is_refused_by_name(value: object) -> None:
    with pytest.raises(SettingsError, match=r"malformed: .*lookup_timeout_ms"):
        ClientSettings.parse({"lamina.lookup_timeout_ms": value})


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("connect_timeout_ms", 0, 1),
        ("lookup_timeout_ms", 0, 1),
        ("retrieve_timeout_ms", -5, 1),
        ("store_timeout_ms", 0, 1),
        ("suspect_after_ms", 0, 1),
        ("reconnect_every_ms", 0, 1),
        ("release_after_slices", -1, 0),
        ("chunk_tokens", 0, 1),
    ],
)
def test_a_client_setting_below_its_range_is_refused(name: str, value: int, least: int) -> None:
    with pytest.raises(SettingsError, match=f"{name} is {value}. Use at least {least}"):
        ClientSettings.parse({f"lamina.{name}": value})
    assert getattr(ClientSettings.parse({f"lamina.{name}": least}), name) == least


def test_a_negative_overlap_is_refused_however_it_is_given() -> None:
    with pytest.raises(SettingsError, match="layerwise_overlap -1 is not understood"):
        ClientSettings(layerwise_overlap=-1)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
        ({"arena_bytes": 4095}, "arena_bytes is 4095"),
        ({"lease_ttl_s": 0.0}, "lease_ttl_s is 0"),
        ({"lease_ttl_s": -1.0}, "lease_ttl_s is -1"),
        ({"lease_ttl_s": float("nan")}, "lease_ttl_s is nan"),
        ({"host_link_gbps": 0.0}, "host_link_gbps is 0"),
        ({"host_link_gbps": -2.0}, "host_link_gbps is -2"),
        ({"http": "9090"}, "'9090' is not host:port"),
    ],
)
def test_a_server_setting_out_of_range_is_refused(options: dict[str, Any], cause: str) -> None:
    with pytest.raises(SettingsError, match=cause):
        ServerSettings(**options)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("8GiB", 8 << 30),
        ("512 MiB", 512 << 20),
        ("1.5KiB", 1536),
        ("2kb", 2000),
        ("3GB", 3 * 10**9),
        ("1TB", 10**12),
        ("3tib", 3 << 40),
        (" 1MB ", 10**6),
        ("4G", 4 << 30),
        ("4g", 4 << 30),
        ("4Gi", 4 << 30),
        ("4 GI", 4 << 30),
        ("512M", 512 << 20),
        ("1.5k", 1536),
        ("2T", 2 << 40),
    ],
)
def test_sizes_are_read_with_their_units(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1GiB",
        "1 P",
        "80%",
        "1iB",
        "8 GiBs",
        "1,5GiB",
        ".5GiB",
        "1e3",
        "inf",
        "nan",
        "8GiB 1",
    ],
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SettingsError, match=r"is not a size\. Use a number with a unit, such as"):
        parse_bytes(text)


def test_an_arena_is_a_size_or_a_share() -> None:
    assert parse_arena("64GiB") == 64 << 30
    assert not isinstance(parse_arena("64GiB"), Share)
    for text, share in (("80%", 0.8), (" 12.5 % ", 0.125), ("100%", 1.0)):
        parsed = parse_arena(text)
        assert isinstance(parsed, Share)
        assert parsed == share
        assert ServerSettings(arena_bytes=parsed).arena_bytes == parsed
    assert str(parse_arena("80%")) == "80%"


@pytest.mark.parametrize("text", ["0%", "101%", "100.1%", "4095", "%", "-5%"])
def test_what_is_no_arena_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"Use "):
        parse_arena(text)


def test_a_size_is_told_in_the_largest_unit_that_it_has() -> None:
    sizes = {
        0: "0 bytes",
        1023: "1023 bytes",
        1024: "1 KiB",
        3 << 19: "1.5 MiB",
        (1 << 30) - 1: "1024 MiB",
        10 << 40: "10 TiB",
    }
    assert {nbytes: size_text(nbytes) for nbytes in sizes} == sizes


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.text(max_size=12))
def test_no_text_makes_a_parser_raise_anything_but_a_settings_error(text: str) -> None:
    for parse in (parse_arena, parse_bytes, parse_overlap, parse_address):
        with contextlib.suppress(SettingsError):
            parse(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9090", ("127.0.0.1", 9090)),
        ("[::]:0", ("::", 0)),
        ("[::1]:9876", ("::1", 9876)),
        ("h:65535", ("h", 65535)),
    ],
)
def test_an_address_is_host_and_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost",
        ":9090",
        "h:",
        "h:-1",
        "h:65536",
        "h:http",
        "h: 1",
        "::1:80",
        ":::0",
        "[::1]",
        "[]:80",
        "[127.0.0.1]:80",
        "h:٣",
    ],
)
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SettingsError, match=r"is not host:port. Use for example 127\.0\.0\.1:90"):
        parse_address(text)


def test_a_socket_path_too_long_is_refused_wherever_it_is_given() -> None:
    fits, too_long = Path("/" + "x" * 106), Path("/" + "x" * 107)
    check_socket_path(fits)
    assert ServerSettings(socket=fits).socket == ClientSettings(socket=fits).socket == fits
    for refuse in (
        check_socket_path,
        lambda path: ClientSettings(socket=path),
        lambda path: ServerSettings(socket=path),
    ):
        with pytest.raises(SettingsError, match=r"longer than 107 bytes\. Choose a shorter path"):
            refuse(too_long)


def test_the_length_of_a_socket_path_is_counted_in_bytes() -> None:
    assert len(os.fsencode("/" + "é" * 54)) > MAX_SOCKET_PATH_BYTES > len("/" + "é" * 54)
    with pytest.raises(SettingsError, match="longer than"):
        check_socket_path(Path("/" + "é" * 54))


def test_the_default_socket_is_the_same_in_every_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine under systemd or cron has other variables than a server from a login shell."""
    monkeypatch.delenv("LAMINA_SOCKET", raising=False)
    for runtime in ("/run/user/7", ""):
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        assert default_socket() == Path(f"/tmp/lamina-{os.geteuid()}/lamina.sock")
    for make in (ClientSettings, ServerSettings):
        monkeypatch.setenv("LAMINA_SOCKET", "/run/lamina/lamina.sock")
        assert make().socket == Path("/run/lamina/lamina.sock")
        monkeypatch.setenv("LAMINA_SOCKET", "")
        assert make().socket == Path(f"/tmp/lamina-{os.geteuid()}/lamina.sock")


@pytest.mark.parametrize("uid", [-1, 2**32 - 1])
def test_a_number_that_is_no_users_is_refused(uid: int) -> None:
    with pytest.raises(SettingsError, match=f"server_uid {uid} is no user's number"):
        ClientSettings(server_uid=uid)
    with pytest.raises(SettingsError, match=rf"allow_uid {uid} is no user's number.*`id -u USER`"):
        ServerSettings(allow_uids=(1000, uid))


def test_lists_of_counts() -> None:
    assert parse_counts("1, 8,32") == (1, 8, 32)
    for text in ("", "a", "1,", "0", "-1", "1.5", "9" * 5000):
        with pytest.raises(SettingsError, match="no list of counts"):
            parse_counts(text)


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("socket", "/tmp/x.sock", Path("/tmp/x.sock")),
        ("lookup_timeout_ms", "7", 7),
        ("layerwise_overlap", "true", 1),
        ("layerwise_overlap", "auto", "auto"),
        ("release_after_slices", None, None),
        ("chunk_tokens", "64", 64),
    ],
)
def test_settings_that_are_built_are_read_as_settings_that_are_parsed(
    name: str, value: Any, taken: Any
) -> None:
    built = ClientSettings(**{name: value})
    assert getattr(built, name) == taken
    assert type(getattr(built, name)) is type(taken)
    assert built == ClientSettings.parse({f"lamina.{name}": value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("socket", 7),
        ("lookup_timeout_ms", "soon"),
        ("lookup_timeout_ms", None),
        ("reconnect_every_ms", 1.5),
        ("layerwise_overlap", "ture"),
        ("release_after_slices", []),
    ],
)
def test_settings_that_are_built_wrongly_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=name):
        ClientSettings(**{name: value})
