"""Private data is found where it is, and nothing else is; what replaces it holds nothing of it."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mds_data.cli import main
from mds_data.errors import DataError
from mds_data.privacy import (
    MODES,
    AllowList,
    Finding,
    Redactor,
    find,
    national_checks,
    national_letters,
    redact,
)
from mds_data.privacy.checksums import mod11_10
from mds_data.privacy.stream import HELD_BACK, redact_stream

KEY = b"a key of thirty-two bytes, or so"

# Published examples: registries' documentation, RFC 5737, card networks' test numbers, the issuers'
# documentation of their keys. Each value stands in the text once.
FOUND = [
    ("EMAIL", "write to bob.smith+lists@mail.example.co.uk.", "bob.smith+lists@mail.example.co.uk"),
    ("EMAIL", "Kontakt: jürgen@müller.de", "jürgen@müller.de"),
    ("EMAIL", "邮箱 用户@例子.公司,谢谢", "用户@例子.公司"),
    ("EMAIL", "<info@xn--mller-kva.xn--p1ai>", "info@xn--mller-kva.xn--p1ai"),
    ("IP", "from 203.0.113.77:443 at", "203.0.113.77"),
    ("IP", "host 192.168.10.5 answered", "192.168.10.5"),
    ("IP", "over 2001:db8:85a3::8a2e:370:7334 now", "2001:db8:85a3::8a2e:370:7334"),
    ("IP", "[fe80::1ff:fe23:4567:890a%eth2]", "fe80::1ff:fe23:4567:890a%eth2"),
    ("IP", "via ::ffff:192.0.2.128 it", "::ffff:192.0.2.128"),
    ("CARD", "pay 4111 1111 1111 1111 today", "4111 1111 1111 1111"),
    ("CARD", "5555-5555-5555-4444", "5555-5555-5555-4444"),
    ("CARD", "amex 378282246310005.", "378282246310005"),
    ("CARD", "3782 822463 10005", "3782 822463 10005"),
    ("CARD", "6011.1111.1111.1117", "6011.1111.1111.1117"),
    ("CARD", "jcb 3530111333300000", "3530111333300000"),
    ("IBAN", "IBAN: DE89 3704 0044 0532 0130 00.", "DE89 3704 0044 0532 0130 00"),
    ("IBAN", "GB29NWBK60161331926819", "GB29NWBK60161331926819"),
    ("IBAN", "FR14 2004 1010 0505 0001 3M02 606", "FR14 2004 1010 0505 0001 3M02 606"),
    ("IBAN", "NO93-8601-1117-947", "NO93-8601-1117-947"),
    ("CRYPTO", "to 1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNa", "1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNa"),
    (
        "CRYPTO",
        "bc1qar0srrr7xfkvy5l643lydnw9re59gtzzwf5mdq!",
        "bc1qar0srrr7xfkvy5l643lydnw9re59gtzzwf5mdq",
    ),
    ("NATIONAL_ID", "SSN 078-05-1120", "078-05-1120"),
    ("NATIONAL_ID", "social security number: 078051120", "078051120"),
    ("NATIONAL_ID", "身份证 11010519491231002X", "11010519491231002X"),
    ("NATIONAL_ID", "CPF 529.982.247-25", "529.982.247-25"),
    ("NATIONAL_ID", "le 2 55 08 14 168 025 38", "2 55 08 14 168 025 38"),
    ("NATIONAL_ID", "IdNr 86 095 742 719", "86 095 742 719"),
    ("NATIONAL_ID", "NINO AB 12 34 56 C", "AB 12 34 56 C"),
    ("NATIONAL_ID", "NHS number 943 476 5919", "943 476 5919"),
    ("NATIONAL_ID", "DNI 12345678Z", "12345678Z"),
    ("NATIONAL_ID", "codice fiscale RSSMRA85T10A562S", "RSSMRA85T10A562S"),
    ("NATIONAL_ID", "PESEL 44051401359", "44051401359"),
    ("NATIONAL_ID", "S1234567D", "S1234567D"),
    ("NATIONAL_ID", "A123456789", "A123456789"),
    ("NATIONAL_ID", "756.9217.0769.85", "756.9217.0769.85"),
    ("NATIONAL_ID", "131052-308T", "131052-308T"),
    ("PASSPORT", "passport no. X12345678", "X12345678"),
    ("PASSPORT", "护照号:E12345678", "E12345678"),
    ("PHONE", "call (415) 555-2671 or", "(415) 555-2671"),
    ("PHONE", "415-555-2671", "415-555-2671"),
    ("PHONE", "ring +44 20 7946 0958", "+44 20 7946 0958"),
    ("PHONE", "in London 020 7946 0958", "020 7946 0958"),
    ("PHONE", "07700 900123", "07700 900123"),
    ("PHONE", "+49 (0)30 1234567", "+49 (0)30 1234567"),
    ("PHONE", "0171/2345678", "0171/2345678"),
    ("PHONE", "06.12.34.56.78", "06.12.34.56.78"),
    ("PHONE", "手机13812345678。", "13812345678"),
    ("PHONE", "138-1234-5678", "138-1234-5678"),
    ("PHONE", "tel 5552671 ok", "5552671"),
    ("SECRET", "key AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
    (
        "SECRET",
        "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
        "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    ),
    ("SECRET", "password = 'correct-horse7'", "correct-horse7"),
    ("SECRET", '"api_key": "zaCELgL0imfnc8mVLWwsAawjYr4Rx"', "zaCELgL0imfnc8mVLWwsAawjYr4Rx"),
    (
        "SECRET",
        "db postgres://admin:s3cr3tPa55@db.example.com:5432/app",
        "postgres://admin:s3cr3tPa55@db.example.com:5432/app",
    ),
    (
        "SECRET",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    ),
    (
        "SECRET",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEow7f\nq9Zx\n-----END RSA PRIVATE KEY-----\nend",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEow7f\nq9Zx\n-----END RSA PRIVATE KEY-----",
    ),
]

# Beside scripts without spaces, in brackets, under words of other languages. Numbers are made up
# and have right check digits (python-stdnum agrees).
FOUND_IN_OTHER_LAYOUTS = [
    ("IP", "IP地址是192.168.92.47。请检查", "192.168.92.47"),
    ("IP", "地址2a00::cc39不可用", "2a00::cc39"),
    ("IP", "nameserver 8.8.8.8", "8.8.8.8"),
    ("IBAN", "账号DE89370400440532013000请查收", "DE89370400440532013000"),
    ("CARD", "troy 9792030394440796", "9792030394440796"),
    ("CARD", "номер карты 4111-1111-1111-1111", "4111-1111-1111-1111"),
    ("PHONE", "Anna (+61461952574) will come", "+61461952574"),
    ("PHONE", "Anna (+1 (204) 984-8054) came", "+1 (204) 984-8054"),
    ("PHONE", "| Bob | +818098116402 | Paris |", "+818098116402"),
    ("PHONE", "Anna, 0033 4 54 17 62 87, Lyon", "0033 4 54 17 62 87"),
    ("PHONE", "office 889-421-5554 x011 or", "889-421-5554 x011"),
    ("PHONE", "Звоните (495) 354-36-64", "(495) 354-36-64"),
    ("PHONE", "Моб.: 89156766217", "89156766217"),  # noqa: RUF001
    ("PHONE", "연락처 02)5543-8328", "02)5543-8328"),
    ("PHONE", "Mobile No. 080 4383 4210", "080 4383 4210"),
    ("PHONE", "il mio numero è 347 12 52 423", "347 12 52 423"),
    ("PHONE", "手机号13064581984", "13064581984"),
    ("NATIONAL_ID", "CUIT: 20-25899040-5", "20-25899040-5"),
    ("NATIONAL_ID", "INSZ 81011435065", "81011435065"),
    ("NATIONAL_ID", "ЕГН: 8210270690", "8210270690"),
    ("NATIONAL_ID", "rodné číslo 850102/1826", "850102/1826"),
    ("NATIONAL_ID", "isikukood 48005241692", "48005241692"),
    ("NATIONAL_ID", "HKID: Z899650(5)", "Z899650(5)"),
    ("NATIONAL_ID", "OIB: 69521805999", "69521805999"),
    ("NATIONAL_ID", "PPS No. 7525932P", "7525932P"),
    ("NATIONAL_ID", "תעודת זהות 023634868", "023634868"),
    ("NATIONAL_ID", "CNP: 1941130081927", "1941130081927"),
    ("NATIONAL_ID", "ИНН 475714917397", "475714917397"),
    ("NATIONAL_ID", "주민등록번호는 4802221585091입니다", "4802221585091"),
    ("NATIONAL_ID", "codice fiscale cbpdbs93l49h501z", "cbpdbs93l49h501z"),
    ("NATIONAL_ID", "身分證M112977222", "M112977222"),
    ("NATIONAL_ID", "kimlik no 72829863982", "72829863982"),
    ("NATIONAL_ID", "South African ID 481106 7984 084", "481106 7984 084"),
    ("NATIONAL_ID", "Henkilötunnus: 251257-6427", "251257-6427"),
    ("SECRET", "authorization: bearer 1FZpqJlNJ1WTJtzujPIfto4W", "1FZpqJlNJ1WTJtzujPIfto4W"),
    ("SECRET", "machine h\n  login bob\n  password 0Xgg$b2kLY1", "0Xgg$b2kLY1"),
    ("SECRET", "contraseña : Ellu#BWS18X6k71", "Ellu#BWS18X6k71"),
    ("SECRET", "密码\uff1aoHZw!4xTa090", "oHZw!4xTa090"),
    ("SECRET", "define('DB_PASSWORD', 'oHZw!4xTa090');", "oHZw!4xTa090"),
    ("SECRET", "<password>qCuH#Wzej7PC5</password>", "qCuH#Wzej7PC5"),
    ("SECRET", "password: hunter2\nuser: bob", "hunter2"),
    ("SECRET", "Das Passwort lautet Geheim123!", "Geheim123!"),
    ("PHONE", "(+34) 915 555 555", "(+34) 915 555 555"),
    ("PHONE", "91-9876543210", "91-9876543210"),
    ("SECRET", "run --password jKMb#xbqSbf9 now", "jKMb#xbqSbf9"),
]

# As people hide them from robots, as mail servers, web pages and input methods write them.
FOUND_DISGUISED = [
    ("EMAIL", "bob.smith (at) example (dot) com", "bob.smith (at) example (dot) com"),
    ("EMAIL", "bob [at] uni-x.ac.uk, or", "bob [at] uni-x.ac.uk"),
    ("EMAIL", "ask bob at example dot com", "bob at example dot com"),
    ("EMAIL", "bob.smith @ example.com", "bob.smith @ example.com"),
    ("EMAIL", "to=bob%40example.com&x=1", "to=bob%40example.com"),
    ("EMAIL", "bob&#64;example.com", "bob&#64;example.com"),
    ("EMAIL", "mail bo\u200bb@exam\u00adple.com now", "bo\u200bb@exam\u00adple.com"),
    ("EMAIL", "bob\uff20example\uff0ecom", "bob\uff20example\uff0ecom"),
    ("IP", "Received: from x ([IPv6:2001:db8::7:1])", "2001:db8::7:1"),
    ("IP", "ip:::ffff:192.0.2.7; ok", "::ffff:192.0.2.7"),
    ("IP", "ip-10-0-31-7.ec2.internal", "-10-0-31-7"),
    ("IP", "traffic to 203[.]0[.]113[.]66", "203[.]0[.]113[.]66"),
    ("CARD", "card 4111 1111\n1111 1111.", "4111 1111\n1111 1111"),
    ("CARD", "4111\t1111\t1111\t1111", "4111\t1111\t1111\t1111"),
    ("CARD", "VISA4111111111111111", "4111111111111111"),
    (
        "CARD",
        "\uff14\uff11\uff11\uff11" + "\uff11" * 12,
        "\uff14\uff11\uff11\uff11" + "\uff11" * 12,
    ),
    ("IBAN", "IBANDE89370400440532013000", "DE89370400440532013000"),
    (
        "IBAN",
        "DE89\u202f3704\u202f0044\u202f0532\u202f0130\u202f00",
        "DE89\u202f3704\u202f0044\u202f0532\u202f0130\u202f00",
    ),
    ("PHONE", "they report 07848 733587 now", "07848 733587"),
    ("PHONE", "reach us ((312) 671-3059)", "(312) 671-3059"),
    ("PHONE", "+52 1 55 4575 2637", "+52 1 55 4575 2637"),
    ("SECRET", "curl -u bob:UxSVv1U0O3og1 https://h", "UxSVv1U0O3og1"),
    ("SECRET", "ENV SECRET_KEY JtCCgPh75xKHrTL7M8yy", "JtCCgPh75xKHrTL7M8yy"),
    ("SECRET", "Cookie: sessionid=VnHNyg7Gt0Jx1AiDweFa;", "VnHNyg7Gt0Jx1AiDweFa"),
    ("SECRET", "identified by 'AQjb9Sjog!2'", "AQjb9Sjog!2"),
    ("SECRET", "the password is hunter249. Then", "hunter249."),
    (
        "SECRET",
        "Subscription-Key: 31d1955786ebfa86d7f76b35810bfa4b",
        "31d1955786ebfa86d7f76b35810bfa4b",
    ),
]

NOT_PRIVATE = [
    "look at the dot product; f(at=3, b.com), x @ self.w, a (at) b",
    "ratio 8:1::4:6, std::a1::b2, 143[.]45[.]217",
    "2001\n2002\n2003\n2004\n5105\n1051\n0510\n5100\n",
    "EAN 6244977465895, IMEI 659506968172536",
    "bit rate 820 527 4851 bps, id de831ec4-b3eb",
    "released as v1.2.3.4, version 10.0.1.2, firmware 4.0.0.1",
    "commit 3b18e512dba79e4c8300dd08aeb37f8e728b8dad",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "id 550e8400-e29b-41d4-a716-446655440000",
    "on 2024-01-02 at 12:34:56, 02.01.2024, 1/2/2024, 20240102T123456",
    "ISBN 978-0-306-40615-7 and ISBN 0-306-40615-2",
    "doi:10.1000/182 and arXiv:1706.03762",
    "std::vector<a::b> c::d; ns::dead::beef",
    "at 48.858222, 2.294500 (48.8582° N)",
    "@dataclass and foo@2x.png and npm i left-pad@1.3.0",
    "git clone git@github.com:owner/name.git",
    "epoch 1700000000, 1700000000000 ms",
    "pi is 3.14159265358979 and e 2.718281828459045",
    "0x1234567890abcdef 0b101010101 1_000_000_000",
    "the key is under the mat; password is required; token: string",
    "export TOKEN=${TOKEN} password=<your password>",
    "4111 1111 1111 1112 is no card's number",
    "DE89 3704 0044 0532 0130 01 has a wrong checksum",
    "OID 1.3.6.1.4.1.311.21.8 and 1.2.840.113549.1.1.11",
    "sizes 1024 2048 4096 8192 16384 and 640x480",
    "::1, ff:ff:ff:ff:ff:ff, 12:34:56",
    "page 1234-1250, lines 100-200, section 10.2.3.4",
    "ORDER 000123456789, part 12-3456-789",
    "dpkg (1.16.4.3) unstable; libx (21.0.19.1-2), since 1.4.0.32",
    "USPS 9827 6197 8522 9889 6501 90, tracking number 003195882876, AWB 045-63305555",
    "population 944 402 234, £785 789 329, 609.931.455,27 €",
    "request id=856366877055, lot 8927-8031-6761",
    "Date: Fri Oct 14 07:14:00 2022 -0700, [006051.365128] usb 1-1",
    "U+2010..2012, U+2032-2037, kmod (30+20221128-1)",
    "[ 306 252 0 507 507 507 507 507 507 507 507 ]",
    "lat=44.34778189&lon=-154.07350793",
    "30-05-1998 17-21-31, Buffer 66 68 71 77 68 67 61 64 73",
    "USPS 9993 3109 6768 6194 3662 00, failed 571 612 1056 33 44",
    "PASS: binutils-all/i386/pr21231a",
    "https://user:pass@example.org/",
    "calls from 20170617, copyright call 2016-2018",
    "password: utf8 text of 12 letters, pw = width1",
    "$pass = !$pass1; --password <password>",
]


@pytest.mark.parametrize(
    ("kind", "text", "value"), [*FOUND, *FOUND_IN_OTHER_LAYOUTS, *FOUND_DISGUISED]
)
def test_finds_the_value_and_its_kind(kind: str, text: str, value: str) -> None:
    start = text.index(value)

    assert find(text) == [(start, start + len(value), kind)]


@pytest.mark.parametrize("text", NOT_PRIVATE)
def test_leaves_what_only_looks_alike(text: str) -> None:
    assert [(text[start:end], kind) for start, end, kind in find(text)] == []


def test_one_wrong_digit_is_no_card_account_or_identity_number() -> None:
    for kind, text, value in FOUND:
        if kind in ("CARD", "IBAN"):
            place = next(i for i in reversed(range(len(value))) if value[i].isdigit())
            wrong = f"{value[:place]}{(int(value[place]) + 1) % 10}{value[place + 1 :]}"
            kinds = {found for _, _, found in find(text.replace(value, wrong))}
            assert kind not in kinds, wrong


RIGHT_NUMBERS = [
    (national_checks.cuit, "20258990405"),
    (national_checks.belgium, "81011435065"),
    (national_checks.egn, "8210270690"),
    (national_checks.rodne_cislo, "8501021826"),
    (national_checks.baltic, "48005241692"),
    (national_checks.cnp, "1941130081927"),
    (national_checks.inn, "475714917397"),
    (national_checks.korea, "4802221585091"),
    (national_checks.portugal, "123456789"),
    (national_letters.hkid, "Z8996505"),
    (national_letters.taiwan, "M112977222"),
    (national_letters.hetu, "2512576427"),
    (mod11_10, "69521805999"),
]


@pytest.mark.parametrize(("is_right", "number"), RIGHT_NUMBERS)
def test_one_last_digit_is_right(is_right: Callable[[str], bool], number: str) -> None:
    assert [digit for digit in "0123456789" if is_right(number[:-1] + digit)] == [number[-1]]


def test_no_text_takes_time_out_of_proportion() -> None:
    pieces = ["4", "@", ":", "1.", "1-", "a@", "8.8.4.4 ", "DE89 ", "a@b.co ", "x://y:", "eyJa."]

    for piece in pieces:
        steps = [_steps(piece * (length // len(piece))) for length in (4_000, 16_000)]

        assert steps[1] < 6 * steps[0] + 200, piece


def _steps(text: str) -> int:
    """Calls of Python and C functions, which no load of the machine changes."""
    counted = Counter[str]()
    sys.setprofile(lambda _frame, event, _argument: counted.update((event,)))
    try:
        find(text)
    finally:
        sys.setprofile(None)
    return counted["call"] + counted["c_call"]


def test_many_findings_take_time_in_proportion() -> None:
    text = "a@example.org 192.0.2.1 " * 500

    assert len(find(text)) == 1000


@pytest.mark.parametrize("mode", MODES)
def test_what_follows_a_dropped_value_stays(mode: Any) -> None:
    text = "machine h login bob password r1h8$Y7Gr6 Merci. run --password jKMb#xbqSbf9 later"

    assert redact(text, mode, key=KEY).endswith(" later")
    assert " Merci. run --password " in redact(text, mode, key=KEY)


@pytest.mark.parametrize("mode", MODES)
def test_redacting_again_changes_nothing(mode: Any) -> None:
    text = "; ".join(text for _, text, _ in FOUND)

    once = redact(text, mode, key=KEY)

    assert redact(once, mode, key=KEY) == once
    assert not [value for _, _, value in FOUND if value in once]


def test_a_pseudonym_is_one_for_one_value_however_it_is_written() -> None:
    redactor = Redactor("pseudonym", key=KEY)

    written = ("4111 1111 1111 1111", "4111111111111111", "4111 1111 \u200b1111\t1111")
    same = {redactor(card) for card in written}

    assert len(same) == 1
    assert redactor("5555-5555-5555-4444") not in same
    assert Redactor("pseudonym", key=KEY[::-1])("4111111111111111") not in same


def test_a_pseudonym_needs_a_key() -> None:
    with pytest.raises(DataError, match="openssl rand"):
        Redactor("pseudonym", key=b"short")


def test_allowed_values_stay() -> None:
    allow = AllowList(["*@example.org", "192.0.2.1"])
    text = "a@example.org b@example.com 192.0.2.1 192.0.2.2"

    assert redact(text, allow=allow) == "a@example.org <EMAIL> 192.0.2.1 <IP>"


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_pieces_give_what_the_whole_gives(data: st.DataObject) -> None:
    draw = data.draw
    filler = st.sampled_from(["lorem ipsum dolor sit amet. " * 900, "x" * 20_000, "\n", "7 "])
    values = st.sampled_from([text for _, text, _ in FOUND])
    text = " ".join(draw(st.lists(st.one_of(filler, values), min_size=1, max_size=12)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = Redactor()

    assert "".join(redact_stream(pieces, Redactor())) == whole.replace(text, whole.find(text))


@pytest.mark.parametrize(
    ("mode", "workers"), [*((mode, "1") for mode in MODES), ("placeholder", "2")]
)
def test_nothing_that_the_command_writes_or_says_holds_a_value(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], mode: str, workers: str
) -> None:
    key = tmp_path / "key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    everything = [*FOUND, *FOUND_IN_OTHER_LAYOUTS, *FOUND_DISGUISED]
    source = tmp_path / "raw" / "raw.jsonl"
    source.parent.mkdir()
    with source.open("w", encoding="utf-8") as file:
        for _, text, _ in everything:
            file.write(json.dumps({"text": text, "meta": {"note": text}}) + "\n")
    output = tmp_path / "out"
    output.mkdir()
    arguments = ["--report", str(output / "report.json"), "--samples", str(output / "look.html")]

    arguments += ["--mode", mode, *(["--key-file", str(key)] if mode == "pseudonym" else [])]

    files = ["--input", str(source), "--output", str(output / "clean.jsonl")]
    code = main(["redact", *files, "--all-fields", "--workers", workers, *arguments])

    assert code == 0
    written = [path.read_text("utf-8") for path in output.iterdir()]
    assert len(written) == 4  # with where the records come from
    shown = [*written, *capfd.readouterr()]
    for value in (*(value for _, _, value in everything), KEY.decode()):
        assert not any(value in text or json.dumps(value)[1:-1] in text for text in shown), value
    report = json.loads((output / "report.json").read_text())
    assert report["documents"] == report["documents_changed"] == len(everything)
    assert sum(report["replaced"].values()) == 2 * len(everything)


def test_a_broken_line_ends_the_run_and_leaves_no_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "raw.jsonl"
    source.write_text('{"text": "a@example.org"}\n{"text": "b@exam\n')

    code = main(["redact", "--input", str(source), "--output", str(tmp_path / "clean.jsonl")])

    error = capsys.readouterr().err
    assert code == 3
    assert "line 2" in error
    assert "b@exam" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw.jsonl"]


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
def test_a_key_that_others_can_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "raw.jsonl").write_text('{"text": "a@example.org"}\n')
    key = tmp_path / "key"
    key.write_bytes(KEY)
    key.chmod(0o644)
    run = ["redact", "--input", str(tmp_path / "raw.jsonl"), "--mode", "pseudonym"]
    run += ["--key-file", str(key), "--output", str(tmp_path / "clean.jsonl")]

    assert main(run) == 3
    assert "chmod 600" in capsys.readouterr().err

    key.chmod(0o600)
    assert main(run) == 0
    assert "<EMAIL_" in (tmp_path / "clean.jsonl").read_text()


def test_a_word_that_was_given_out_already_still_vouches_for_the_number_behind_it() -> None:
    # What is given out first ends between the word and the number.
    before = " " * (HELD_BACK - len("tel ")) + "tel "
    piece = (before + "5552671").ljust(2 * HELD_BACK)

    redacted = "".join(redact_stream([piece, " and more"], Redactor()))

    assert redacted.split() == ["tel", "<PHONE>", "and", "more"]


@pytest.mark.skipif(find_spec("presidio_analyzer") is not None, reason="Presidio is installed")
def test_names_need_their_extra(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "raw.jsonl").write_text('{"text": "Angela Merkel"}\n')
    run = ["redact", "--input", str(tmp_path / "raw.jsonl"), "--names", "en_core_web_sm"]

    assert main([*run, "--output", str(tmp_path / "clean.jsonl")]) != 0
    assert "mds-data[names]" in capsys.readouterr().err
    assert not (tmp_path / "clean.jsonl").exists()


def test_names_join_what_rules_find() -> None:
    def smiths(text: str) -> list[Finding]:
        return [Finding(*found.span(), "NAME") for found in re.finditer("Smith", text)]

    redactor = Redactor(names=smiths, allow=AllowList(["Jones"]))

    assert redactor("Smith <smith@example.org>, Smith@example.org") == "<NAME> <<EMAIL>>, <EMAIL>"
    assert redactor.counts == {"NAME": 1, "EMAIL": 2}
