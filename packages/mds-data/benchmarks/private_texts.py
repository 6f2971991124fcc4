"""Made-up private data as people write it, and what looks alike and is none; seeded.

Everything is random; numbers with check digits are computed here, from the definitions, so that
this file shares no code with the detectors that it judges.
"""
# ruff: noqa: E501, RUF001 - the forms stand side by side, as people write them

import random
import string
from functools import partial

__all__ = ["labelled", "negatives"]

_FIRST = ("anna", "ben", "chloe", "dmitri", "elif", "fatima", "jürgen", "keiko", "li", "maria")
_LAST = ("smith", "müller", "dubois", "rossi", "tanaka", "wang", "silva", "nguyen", "garcía")
_WORDS = ("the", "report", "says", "that", "our", "team", "met", "on", "monday", "about", "plan")
_HEX = "0123456789abcdef"
_ALNUM = string.ascii_letters + string.digits


def _pick(r, choices, count):
    return "".join(r.choice(choices) for _ in range(count))


def _digits(r, count, first="123456789"):
    return r.choice(first) + _pick(r, string.digits, count - 1)


def _luhn(number):
    total = 0
    for place, digit in enumerate(reversed(number)):
        value = int(digit) * (2 if place % 2 == 0 else 1)
        total += value - 9 if value > 9 else value
    return number + str(-total % 10)


def _weighted(digits, weights):
    return sum(int(d) * w for d, w in zip(digits, weights, strict=True))


def _email(r):
    first, last = r.choice(_FIRST), r.choice(_LAST)
    local = r.choice([
        f"{first}.{last}", f"{first[0]}{last}", f"{first}_{last}{r.randint(1, 99)}",
        f"{last}+{r.choice(['spam', 'list', 'x'])}", f"{first}-{last}", first, f"{first}%{last}",
        f"o'{last}", f"{first}.{r.choice('abc')}.{last}", f"{r.randint(100, 9999)}{first}",
    ])  # fmt: skip
    domain = r.choice([
        "example.com", "mail.example.co.uk", "beispiel-firma.de", "münchen.example", "例え.jp",
        "xn--mnchen-3ya.de", "uni.edu.cn", "почта.рф", "dept.cs.univ.ac.jp", "startup.io",
        "a-b.museum", "x.photography", "company.technology", "sub.a.b.c.org", "empresa.com.br",
    ])  # fmt: skip
    address = f"{local}@{domain}"
    return r.choice([address, address, address.upper(), address.title()])


def _email_around(r):
    value = _email(r)
    before, after = r.choice([
        ("", ""), ("<", ">"), ("mailto:", ""), ("(", ")"), ('"', '"'), ("", ","), ("", "."),
        ("[", "]"), ("e-mail:", ""), ("href='mailto:", "?subject=hi'"), ("From: X <", ">;"),
        ("联系", "。"), ("|", "|"), ("email=", "&x=1"), ("`", "`"), ("\t", "\n"), ("**", "**"),
    ])  # fmt: skip
    return before, value, after


def _ip(r):
    octets = [r.choice([10, 172, 192, r.randint(11, 223)]), *(r.randint(0, 255) for _ in range(3))]
    if octets[0] == 192:
        octets[1] = 168
    if octets[0] == 172:
        octets[1] = r.randint(16, 31)
    v4 = ".".join(map(str, octets))
    groups = [f"{r.randint(1, 65535):x}" for _ in range(8)]
    groups[0] = r.choice(["2001", "2a02", "fe80", "fd12", "2607"])
    short = f"{':'.join(groups[: r.randint(2, 4)])}::{groups[7]}"
    return r.choice([
        *[v4] * 4, ":".join(groups), ":".join(groups).upper(), short, short.upper(),
        f"fe80::{groups[1]}:{groups[2]}:{groups[3]}:{groups[4]}%{r.choice(['eth0', 'en0', '2'])}",
        f"::ffff:{v4}", f"64:ff9b::{v4}", ":".join(f"{int(g, 16):04x}" for g in groups),
    ])  # fmt: skip


def _ip_around(r):
    value = _ip(r)
    before, after = r.choice([
        ("host ", ""), ("from ", " port 22"), ("[", "]"), ("http://", "/index.html"), ("", ":8080"),
        ("", "/24"), ("", ","), ("", "."), ('"', '"'), ("client=", ""), ("", " - - [date]"),
        ("(", ")"), ("ip:", ";"), ("x-forwarded-for: ", ", "), ("ssh root@", ""), ("", ""),
    ])  # fmt: skip
    if ":" in value and after in (":8080", ""):
        after = " " if after else after
    if ":" in value and before == "http://":
        before, after = "http://[", "]/x"
    return before, value, after


def _card(r):
    prefix, length = r.choice([
        ("4", 16), ("4", 16), ("51", 16), ("55", 16), ("2221", 16), ("34", 15), ("37", 15),
        ("6011", 16), ("65", 16), ("3530", 16), ("36", 14), ("62", 16), ("2200", 16), ("4", 19),
    ])  # fmt: skip
    number = _luhn(prefix + _pick(r, string.digits, length - 1 - len(prefix)))
    if length in (14, 15):
        groups = [number[:4], number[4:10], number[10:]]
    else:
        groups = [number[at : at + 4] for at in range(0, length, 4)]
    return r.choice(["", " ", "-", ".", "  ", "\u00a0", " - ", "\u2011", "_", "/"]).join(groups)


_IBANS = {
    "DE": "18d", "GB": "4a14d", "FR": "10d11d2d", "NL": "4a10d", "ES": "20d", "IT": "1a22d",
    "CH": "17d", "AT": "16d", "BE": "12d", "PL": "24d", "SE": "20d", "NO": "11d", "MT": "4a23d",
    "SA": "20d", "TR": "22d", "AE": "19d", "IE": "4a14d", "LU": "16d", "BR": "23d1a1d",
}  # fmt: skip


def _iban(r):
    country = r.choice(list(_IBANS))
    body, count = "", ""
    for letter in _IBANS[country]:
        if letter.isdigit():
            count += letter
            continue
        alphabet = string.digits if letter == "d" else string.ascii_uppercase
        body, count = body + _pick(r, alphabet, int(count)), ""
    number = int("".join(str(int(c, 36)) for c in body + country + "00"))
    iban = f"{country}{98 - number % 97:02d}{body}"
    grouped = [iban[at : at + 4] for at in range(0, len(iban), 4)]
    return r.choice([
        iban, " ".join(grouped), iban.lower(), " ".join(grouped).lower(), "-".join(grouped),
        "\u00a0".join(grouped), ".".join(grouped), "\u202f".join(grouped),
    ])  # fmt: skip


def _group(number, sizes, separator):
    parts = []
    for size in sizes:
        parts.append(number[:size])
        number = number[size:]
    return separator.join(part for part in [*parts, number] if part)


def _phone(r):
    s = r.choice([" ", "-", "."])
    us = f"{r.choice('23456789')}{_digits(r, 2)}", f"{r.choice('23456789')}{_digits(r, 2)}"
    us = (r.choice(["212", "415", "646", "312", "713", "305"]), us[1], _digits(r, 4))
    cn = "1" + r.choice("3578") + _digits(r, 9)
    gb = "7" + r.choice("4578") + _digits(r, 8)
    de = r.choice(["30", "89", "40", "69"]) + _digits(r, 7)
    fr = r.choice("1234567") + _digits(r, 8)
    written = {
        "US": [f"({us[0]}) {us[1]}-{us[2]}", s.join(us), f"+1 {us[0]} {us[1]} {us[2]}",
               f"+1{''.join(us)}", f"1-{'-'.join(us)}", f"+1 ({us[0]}) {us[1]}-{us[2]}"],
        "CN": [cn, f"+86 {cn}", f"+86{cn}", f"+86-{cn}", _group(cn, [3, 4], " "),
               _group(cn, [3, 4], "-"), f"0086 {cn}", f"010-{_digits(r, 8)}", f"(+86) {cn}"],
        "GB": [f"+44 {_group(gb, [4], ' ')}", f"0{_group(gb, [4], ' ')}", f"+44{gb}",
               f"+44 (0) {_group(gb, [4], ' ')}", f"0{gb}", f"020 {_group(_digits(r, 8), [4], ' ')}"],
        "DE": [f"+49 {_group(de, [2], ' ')}", f"0{_group(de, [2], '/')}", f"+49-{_group(de, [2], '-')}",
               f"0{_group(de, [2], ' ')}", f"+49 (0){_group(de, [2], ' ')}",
               f"0{_group('15' + _digits(r, 9), [3], ' ')}", f"0049 {_group(de, [2], ' ')}"],
        "FR": [f"0{_group(fr, [1, 2, 2, 2], s)}", f"+33 {_group(fr, [1, 2, 2, 2], ' ')}", f"+33{fr}",
               f"0033 {_group(fr, [1, 2, 2, 2], ' ')}"],
        "JP": [f"090-{_digits(r, 4)}-{_digits(r, 4)}", f"+81 90-{_digits(r, 4)}-{_digits(r, 4)}",
               f"03-{_digits(r, 4)}-{_digits(r, 4)}"],
        "IN": [f"+91 {r.choice('6789')}{_digits(r, 4)} {_digits(r, 5)}",
               f"+91-{r.choice('6789')}{_digits(r, 9)}"],
        "BR": [f"(11) 9{_digits(r, 4)}-{_digits(r, 4)}", f"+55 11 9{_digits(r, 4)}-{_digits(r, 4)}"],
        "ES": [f"+34 {_group('6' + _digits(r, 8), [3, 3], ' ')}",
               _group("6" + _digits(r, 8), [3, 2, 2], " ")],
        "RU": [f"+7 ({r.choice(['495', '916'])}) {_digits(r, 3)}-{_digits(r, 2)}-{_digits(r, 2)}",
               f"8 (916) {_digits(r, 3)}-{_digits(r, 2)}-{_digits(r, 2)}"],
        "KR": [f"010-{_digits(r, 4)}-{_digits(r, 4)}", f"+82 10-{_digits(r, 4)}-{_digits(r, 4)}"],
        "AU": [f"04{_digits(r, 2)} {_digits(r, 3)} {_digits(r, 3)}",
               f"+61 4{_digits(r, 2)} {_digits(r, 3)} {_digits(r, 3)}"],
    }  # fmt: skip
    return r.choice(written[r.choice(list(written))])


def _phone_around(r):
    before, after = r.choice([
        ("call ", ""), ("Tel.: ", ""), ("Phone ", ","), ("(", ")"), ("", ""), ("tel:", ""), ("at ", "."),
        ("手机", "。"), ("Mobile: ", " (home)"), ("📞 ", ""), ("fax ", ";"), ("reach me on ", "!"),
        ("WhatsApp ", ""), ("", " ext. 12"), ("my number is ", ""), ("联系电话：", ""),
    ])  # fmt: skip
    return before, _phone(r), after


def _national_us(r):
    area = r.choice([r.randint(1, 665), r.randint(667, 899)])
    return f"{area:03}-{r.randint(1, 99):02}-{r.randint(1, 9999):04}", "SSN "


def _national_cn(r):
    body = r.choice(["110101", "310115", "440305"]) + _birthday(r, "{0}{1:02}{2:02}")
    body += _pick(r, string.digits, 3)
    last = "10X98765432"[
        _weighted(body, (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)) % 11
    ]
    return body + r.choice([last, last.lower()]), r.choice(["身份证号", "", "ID "])


def _national_br(r):
    body = _digits(r, 9)
    for _ in range(2):
        body += str(_weighted(body, range(len(body) + 1, 1, -1)) * 10 % 11 % 10)
    pretty = f"{body[:3]}.{body[3:6]}.{body[6:9]}-{body[9:]}"
    return r.choice([pretty, pretty, body]), "CPF "


def _national_fr(r):
    body = r.choice("12") + _birthday(r, "{3:02}{1:02}") + f"{r.randint(1, 95):02}{_digits(r, 6)}"
    key = f"{97 - int(body) % 97:02}"
    spaced = f"{_group(body, [1, 2, 2, 2, 3], ' ')} {key}"
    return r.choice([body + key, spaced]), r.choice(["NIR ", "n° de sécu ", ""])


def _national_de(r):
    digits = r.sample("123456789", 9)
    body = "".join([*digits, r.choice(digits)])
    product = 10
    for digit in body:
        product = ((product + int(digit)) % 10 or 10) * 2 % 11
    body += str((11 - product) % 10)
    return r.choice([body, _group(body, [2, 3, 3], " ")]), r.choice(["Steuer-ID ", "IdNr. "])


def _national_in(r):
    letters = string.ascii_uppercase
    pan = f"{_pick(r, letters, 3)}P{r.choice(letters)}{_digits(r, 4)}{r.choice(letters)}"
    return pan, r.choice(["PAN ", ""])


def _national_gb(r):
    prefix = r.choice(["AB", "CE", "HJ", "JK", "EL", "GM"])
    body = f"{prefix}{_digits(r, 6)}{r.choice('ABCD')}"
    return r.choice([body, _group(body, [2, 2, 2, 2], " ")]), r.choice(["NI number ", "NINO: "])


def _national_es(r):
    number = _digits(r, 8)
    return f"{number}{'TRWAGMYFPDXBNJZSQVHLCKE'[int(number) % 23]}", r.choice(["DNI ", ""])


def _national_pl(r):
    body = _birthday(r, "{3:02}{1:02}{2:02}", last=1999) + _digits(r, 4)
    return f"{body}{-_weighted(body, (1, 3, 7, 9, 1, 3, 7, 9, 1, 3)) % 10}", "PESEL "


def _national_ch(r):
    body = "756" + _digits(r, 9)
    body += str(-_weighted(body, (1, 3) * 6) % 10)
    return f"{body[:3]}.{body[3:7]}.{body[7:11]}.{body[11:]}", r.choice(["AHV ", ""])


def _national_kr(r):
    body = _birthday(r, "{3:02}{1:02}{2:02}", last=1999) + r.choice("12") + _digits(r, 5)
    last = (11 - _weighted(body, (2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5)) % 11) % 10
    return f"{body[:6]}-{body[6:]}{last}", r.choice(["주민등록번호 ", ""])


def _birthday(r, form, *, last=2015):
    year = r.randint(1940, last)
    return form.format(year, r.randint(1, 12), r.randint(1, 28), year % 100)


def _national_it(r):
    consonants = "BCDFGLMNPRSTVZ"
    year, month, day = r.randint(1940, 2015), r.randint(1, 12), r.randint(1, 28)
    body = f"{_pick(r, consonants, 6)}{year % 100:02}{'ABCDEHLMPRST'[month - 1]}{day:02}"
    body += f"{r.choice('ABCDEFGHIL')}{_pick(r, string.digits, 3)}"
    odd = (
        1,
        0,
        5,
        7,
        9,
        13,
        15,
        17,
        19,
        21,
        2,
        4,
        18,
        20,
        11,
        3,
        6,
        8,
        12,
        14,
        16,
        10,
        22,
        25,
        24,
        23,
    )
    total = 0
    for place, character in enumerate(body):
        value = int(character) if character.isdigit() else ord(character) - 65
        total += odd[value] if place % 2 == 0 else value
    return body + chr(65 + total % 26), r.choice(["codice fiscale ", ""])


_NATIONAL = (
    *(_national_us, _national_cn, _national_br, _national_fr, _national_de, _national_in),
    *(_national_gb, _national_es, _national_pl, _national_ch, _national_kr, _national_it),
)


def _jwt(r):
    base = string.ascii_letters + string.digits + "-_"
    return f"eyJhbGciOiJIUzI1NiJ9.eyJ{_pick(r, base, 60)}.{_pick(r, base, 43)}"


def _pem(r, line_break):
    kind = r.choice(["", "RSA ", "EC ", "OPENSSH ", "ENCRYPTED "])
    lines = [_pick(r, _ALNUM + "+/", 64) for _ in range(r.randint(3, 25))]
    body = line_break.join(lines)
    return f"-----BEGIN {kind}PRIVATE KEY-----{line_break}{body}{line_break}-----END {kind}PRIVATE KEY-----"


def _secret(r):
    base = _ALNUM + "-_"
    upper = string.ascii_uppercase + string.digits
    b64 = _ALNUM + "+/"
    forms = [
        lambda: "AKIA" + _pick(r, string.ascii_uppercase + "234567", 16),
        lambda: "ghp_" + _pick(r, _ALNUM, 36),
        lambda: "github_pat_" + _pick(r, _ALNUM, 22) + "_" + _pick(r, _ALNUM, 59),
        lambda: "glpat-" + _pick(r, base, 20),
        lambda: f"xoxb-{_digits(r, 12)}-{_digits(r, 12)}-{_pick(r, _ALNUM, 24)}",
        lambda: f"xapp-1-A{_pick(r, upper, 10)}-{_digits(r, 13)}-{_pick(r, _HEX, 64)}",
        lambda: f"https://hooks.slack.com/services/T{_pick(r, upper, 8)}/B{_pick(r, upper, 8)}/{_pick(r, _ALNUM, 24)}",
        lambda: "sk_live_" + _pick(r, _ALNUM, 24),
        lambda: "rk_test_" + _pick(r, _ALNUM, 24),
        lambda: "whsec_" + _pick(r, _ALNUM, 32),
        lambda: "AIza" + _pick(r, base, 35),
        lambda: "ya29." + _pick(r, base, 80),
        lambda: "GOCSPX-" + _pick(r, base, 28),
        lambda: "sk-" + _pick(r, _ALNUM, 48),
        lambda: "sk-proj-" + _pick(r, base, 100),
        lambda: "sk-ant-api03-" + _pick(r, base, 93) + "AA",
        lambda: "hf_" + _pick(r, string.ascii_letters, 34),
        lambda: "npm_" + _pick(r, _ALNUM, 36),
        lambda: "pypi-AgEIcHlwaS5vcmc" + _pick(r, base, 70),
        lambda: f"SG.{_pick(r, base, 22)}.{_pick(r, base, 43)}",
        lambda: "key-" + _pick(r, _HEX, 32),
        lambda: "shpat_" + _pick(r, _HEX, 32),
        lambda: "dop_v1_" + _pick(r, _HEX, 64),
        lambda: "dckr_pat_" + _pick(r, base, 27),
        lambda: "dapi" + _pick(r, _HEX, 32),
        lambda: "lin_api_" + _pick(r, _ALNUM, 40),
        lambda: "hvs." + _pick(r, base, 90),
        lambda: "SK" + _pick(r, _HEX, 32),
        lambda: "nvapi-" + _pick(r, base, 64),
        lambda: "gsk_" + _pick(r, _ALNUM, 52),
        lambda: "glsa_" + _pick(r, _ALNUM, 32) + "_" + _pick(r, _HEX, 8),
        lambda: "PMAK-" + _pick(r, _HEX, 24) + "-" + _pick(r, _HEX, 34),
        lambda: f"{_digits(r, 9)}:AA{_pick(r, base, 33)}",
        lambda: "AGE-SECRET-KEY-1" + _pick(r, "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L", 58),
        lambda: "sntrys_" + _pick(r, _ALNUM, 64),
        lambda: "tskey-auth-" + _pick(r, _ALNUM, 12) + "-" + _pick(r, _ALNUM, 32),
        lambda: "figd_" + _pick(r, base, 40),
        lambda: "ntn_" + _pick(r, _ALNUM, 46),
        lambda: "pat" + _pick(r, _ALNUM, 14) + "." + _pick(r, _HEX, 64),
        lambda: "xkeysib-" + _pick(r, _HEX, 64) + "-" + _pick(r, _ALNUM, 16),
        lambda: "EAA" + _pick(r, _ALNUM, 120),
        lambda: "pplx-" + _pick(r, _ALNUM, 48),
        lambda: "xai-" + _pick(r, _ALNUM, 80),
        lambda: "dp.pt." + _pick(r, _ALNUM, 43),
        lambda: "ops_eyJ" + _pick(r, b64, 250),
        lambda: "sbp_" + _pick(r, _HEX, 40),
        partial(_jwt, r),
        lambda: _pem(r, "\n"),
        lambda: _pem(r, r.choice(["\\n", " "])),
        lambda: f"https://{r.choice(_FIRST)}:{_pick(r, _ALNUM, 12)}@git.example.com/x.git",
        lambda: f"postgres://app:{_pick(r, _ALNUM + '!$', 14)}@db.internal:5432/prod",
        lambda: f"mongodb+srv://root:{_pick(r, _ALNUM, 16)}@cluster0.abcde.mongodb.net/test",
        lambda: f"redis://:{_pick(r, _ALNUM, 20)}@cache:6379/0",
        lambda: "DefaultEndpointsProtocol=https;AccountName=store1;AccountKey="
        + _pick(r, b64, 86) + "==;EndpointSuffix=core.windows.net",
    ]  # fmt: skip
    return "", r.choice(forms)(), ""


def _assigned(r):
    value = _pick(r, _ALNUM, r.randint(16, 40))
    while not any(map(str.isdigit, value)):
        value = _pick(r, _ALNUM, 24)
    strong = _pick(r, _ALNUM, 8) + r.choice("!@#$%^&*") + _pick(r, string.digits, 3)
    aws = _pick(r, _ALNUM + "+/", 39) + "7"
    azure = "8Q~" + _pick(r, _ALNUM + "_~.-", 33)
    return r.choice([
        ("password = '", strong, "'"), ("API_KEY=", value, ""), ('"secret": "', value, '"'),
        ("DB_PASSWORD: ", strong, ""), ("Authorization: Bearer ", value, ""),
        ("aws_secret_access_key = ", aws, ""), ("token: '", value, "'"), ("export GH_TOKEN=", value, ""),
        ("Password is ", strong, ""), ("<password>", strong, "</password>"), ("client_secret=", azure, ""),
        ("--password ", strong, ""), ('"api_key" : "', value, '",'), ("密码：", strong, ""),
        ("Server=db;Database=x;User Id=sa;Password=", strong, ";"), ("-u admin:", value, " https://x"),
        ("ACCESS_TOKEN=\"", value, '"'), ("secretKey: ", value, ""), ("passwd:", strong, ""),
        ("sv=2022-11-02&ss=b&srt=o&sp=r&se=2027-01-01&sig=", _pick(r, _ALNUM, 43) + "%3D", ""),
        ("Authorization: Basic ", _pick(r, _ALNUM, 30) + "==", ""),
    ])  # fmt: skip


def _national_around(r):
    value, before = r.choice(_NATIONAL)(r)
    return before, value, ""


_MAKERS = {
    "EMAIL": _email_around,
    "IP": _ip_around,
    "CARD": lambda r: (r.choice(["card ", "", "Visa: ", "paid with ", "(", "cc="]), _card(r), ""),
    "IBAN": lambda r: (r.choice(["IBAN ", "", "account ", "IBAN: ", "Konto ", "("]), _iban(r), ""),
    "PHONE": _phone_around,
    "NATIONAL_ID": _national_around,
    "SECRET": lambda r: r.choice([_secret, _secret, _assigned])(r),
}


def _sentence(r):
    return " ".join(r.choice(_WORDS) for _ in range(r.randint(2, 9)))


def labelled(count, *, seed):
    """Texts with one value each: (text, start, end, kind), ``count`` of each kind."""
    r = random.Random(seed)
    for kind, make in _MAKERS.items():
        for _ in range(count):
            before, value, after = make(r)
            lead = f"{_sentence(r)} {before}"
            yield f"{lead}{value}{after} {_sentence(r)}", len(lead), len(lead) + len(value), kind


def _isbn13(r):
    body = "978" + _digits(r, 9)
    body += str(-_weighted(body, (1, 3) * 6) % 10)
    return r.choice([body, _group(body, [3, 1, 4, 4], "-")])


def _uuid(r):
    return "-".join(_pick(r, _HEX, size) for size in (8, 4, 4, 4, 12))


def negatives(count, *, seed):
    """Texts that hold nothing private, and look as if they did."""
    r = random.Random(seed)
    d = r.randint
    forms = [
        lambda: f"version {d(0, 20)}.{d(0, 20)}.{d(0, 20)}.{d(0, 99)}",
        lambda: f"v{d(0, 9)}.{d(0, 30)}.{d(0, 30)}-rc{d(1, 9)}", lambda: f"ISBN {_isbn13(r)}",
        lambda: f"doi:10.{d(1000, 9999)}/{r.choice(['j.cell', 'nature', 's41586'])}.{d(1000, 99999)}",
        lambda: f"commit {_pick(r, _HEX, 40)}", lambda: f"sha256:{_pick(r, _HEX, 64)}", lambda: _uuid(r),
        lambda: f"{d(1990, 2030)}-{d(1, 12):02}-{d(1, 28):02}T{d(0, 23):02}:{d(0, 59):02}:{d(0, 59):02}Z",
        lambda: f"{d(1, 28):02}/{d(1, 12):02}/{d(1990, 2030)} {d(10, 23)}:{d(10, 59)}",
        lambda: f"order {d(10**8, 10**10)}", lambda: f"invoice no. {d(10**6, 10**9)}",
        lambda: f"at {d(0, 89)}.{d(10**5, 10**6)}, -{d(0, 179)}.{d(10**5, 10**6)}",
        lambda: f"{d(0, 89)}°{d(0, 59)}'{d(0, 59)}\" N", lambda: f"3.14159265358979{d(10, 99)}",
        lambda: f"{d(10**5, 10**6)} x {d(10**5, 10**6)} = {d(10**11, 10**12)}",
        lambda: f"0x{_pick(r, _HEX, 8)}", lambda: f"0x{_pick(r, _HEX, 16)}", lambda: "std::vector<int>::iterator",
        lambda: f"Foo::Bar::baz{d(1, 9)}", lambda: f"pages {d(100, 400)}-{d(400, 900)}",
        lambda: f"{d(1800, 1950)}-{d(1950, 2020)}", lambda: f"between {d(100, 500)}-{d(500, 999)} units",
        lambda: f"pkg@{d(1, 9)}.{d(0, 9)}.{d(0, 9)}", lambda: "git@github.com:user/repo.git",
        lambda: "@decorator.method(x)", lambda: "a @ b.T @ c", lambda: "logo@2x.png",
        lambda: f"${d(1, 999)},{d(100, 999)},{d(100, 999)}.{d(10, 99)}", lambda: f"{d(1, 9)}.{d(10**6, 10**7)}e-{d(1, 20)}",
        lambda: f"RFC {d(100, 9999)} section {d(1, 9)}.{d(1, 9)}.{d(1, 9)}.{d(1, 9)}",
        lambda: f"matrix [{d(100, 999)} {d(100, 999)} {d(1000, 9999)} {d(100, 999)}]",
        lambda: f"epoch {d(1_500_000_000, 1_800_000_000)}", lambda: f"{d(1_500_000_000_000, 1_800_000_000_000)} ms",
        lambda: f"MAC {':'.join(_pick(r, _HEX, 2) for _ in range(6))}", lambda: f"{d(10, 23)}:{d(10, 59)}:{d(10, 59)}",
        lambda: f"tracking 1Z{_pick(r, string.ascii_uppercase + string.digits, 16)}",
        lambda: f"EAN {d(10**12, 10**13 - 1)}", lambda: f"part no {d(100, 999)}-{d(1000, 9999)}",
        lambda: f"zip {d(10000, 99999)}-{d(1000, 9999)}", lambda: f"ratio {d(1, 9)}:{d(1, 9)}::{d(1, 9)}:{d(1, 9)}",
        lambda: f"#define MAX {d(10**9, 10**10)}UL", lambda: f"seed={d(10**8, 10**10)}",
        lambda: "password: your-password-here", lambda: "API_KEY=<your api key>", lambda: "token = get_token()",
        lambda: "the secret is to keep going", lambda: "password = os.environ['PASSWORD']",
        lambda: "https://example.com/a/b?c=d", lambda: "postgres://user:password@localhost/db",
        lambda: f"arXiv:{d(1000, 2500)}.{d(10000, 99999)}", lambda: f"PMID: {d(10**7, 10**8)}",
        lambda: f"ISSN {d(1000, 9999)}-{d(1000, 9999)}", lambda: f"{d(1, 99)} {d(100, 999)} {d(100, 999)} people",
        lambda: f"chr{d(1, 22)}:{d(10**6, 10**8)}-{d(10**6, 10**8)}", lambda: f"CVE-{d(2000, 2026)}-{d(1000, 99999)}",
        lambda: f"line {d(1, 999)}, column {d(1, 99)}", lambda: f"1, 2, 3, 4, 5, 6, 7, 8, 9, {d(10, 99)}",
        lambda: f"{_pick(r, _ALNUM + '+/', 60)}==", lambda: f"md5 {_pick(r, _HEX, 32)}",
        lambda: f"size {d(10**8, 10**10)} bytes", lambda: f"Psalm {d(1, 150)}:{d(1, 30)}-{d(1, 30)}",
        lambda: f"build 20{d(10, 26)}{d(1, 12):02}{d(1, 28):02}.{d(1, 99)}", lambda: f"JIRA-{d(1000, 99999)}",
        lambda: f"IMEI {d(10**14, 10**15)}", lambda: f"flight LH{d(100, 9999)} seat {d(1, 40)}A",
        lambda: f"bit rate {d(100, 999)} {d(100, 999)} {d(1000, 9999)} bps", lambda: f"score {d(100, 999)}-{d(100, 999)}",
    ]  # fmt: skip
    for _ in range(count):
        yield f"{_sentence(r)} {r.choice(forms)()} {_sentence(r)}"
