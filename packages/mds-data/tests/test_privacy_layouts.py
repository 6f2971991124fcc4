"""Private values as they stand in logs, in strings of code, and behind the words of forms."""

from __future__ import annotations

import pytest

from mds_data.privacy import find

# Values stand once in each text; keys are made up, identity numbers are the registries' specimens.
ESCAPED = [
    ("EMAIL", r'{"to": "anna\u0040example.com"}', r"anna\u0040example.com"),
    ("EMAIL", r"first\nanna@example.com\nlast", "anna@example.com"),
    ("CARD", r"first\n4111 1111 1111 1111\nlast", "4111 1111 1111 1111"),
    ("IBAN", r"\tDE89 3704 0044 0532 0130 00\r\n", "DE89 3704 0044 0532 0130 00"),
    ("IP", r"first\n2001:db8:85a3::8a2e:370:7334\n", "2001:db8:85a3::8a2e:370:7334"),
    ("PHONE", r"a\\n+44 20 7946 0958\\nb", "+44 20 7946 0958"),
    ("SECRET", r"\nkey-26b3e1bff8794df7c7c856f902c84b9a\n", "key-26b3e1bff8794df7c7c856f902c84b9a"),
    ("SECRET", r'"password": "hunter2Zq7\n"', "hunter2Zq7"),
]  # fmt: skip
IN_LOGS = [
    ("IP", "inet6 ::d67/128 scope host", "::d67"),
    ("IP", "地址:2001:db8:85a3::8a2e:370:7334。", "2001:db8:85a3::8a2e:370:7334"),
    ("IP", "9.28.9.4:1697 refused", "9.28.9.4"),
    ("IP", "X-Forwarded-For: 3.8.1.6", "3.8.1.6"),
    ("EMAIL", 'for <"john..doe"@example.com>', '"john..doe"@example.com'),
    ("SECRET", "jdbc oracle+cx_oracle://app:MyY0voap@db/x", "oracle+cx_oracle://app:MyY0voap@db/x"),
]
KEYS = [
    "be823dab507d7c809a252d56018c2802-us9",
    "h9P8Q~2gJHkcSlF4HTnj6EgS3SDcR-GA5H0nHDEJ",
    "OXMiLXZtPxKGsKZjNUdNk4ul.2760R6.9i_A8yi-yxZyOmB5JmevJFQxH1wP4BsMbZymBN",
    "secret_SqfOkzH5Lk8nszLtCaHBsUdZdyR8ZY9xJSthxfGNvv3",
    "CCIPAT_qZggJkNwnGcbMyV7axrMuo_fc5fd9443b69223707b896fd46305a5647b24b9f",
    "oy2t55brql3aqbyetjwwtbdzhuoqczj3u4vjda4u2qvja4",
    "LTAIKhjWZDbFAjQmgglQX5zz",
    "AKIDV9H3iuQ9HWg9mxClKmUi0XkexnFJO0NZ",
    "tfp_w6w72p8Coy1fDJq5t3yaxd7dr7-n3ZQ_G4AX3K2laCg7JFFVZ4izoiOqjVm",
    "LS0tLS1CRUdJTiBSU0EgUFJJVkFURSBLRVktLS0tLQpNSUlFb3dJQkFBS0NBUUVBdzVkVnBqSg==",
]
NAMED = [
    ("PHONE", "call 253-633-1478x932 today", "253-633-1478x932"),
    ("PHONE", "Telefon 011 231 4396", "011 231 4396"),
    ("PHONE", "Tél. 2128 8377", "2128 8377"),
    ("NATIONAL_ID", "Personalausweis-Nr. L01X00T471", "L01X00T471"),
    ("NATIONAL_ID", "My Number: 1234 5678 9018", "1234 5678 9018"),
    ("NATIONAL_ID", "SA ID 8001015009087", "8001015009087"),
    ("NATIONAL_ID", "NINO TN 01 01 63 F", "TN 01 01 63 F"),
    ("NATIONAL_ID", "his Aadhaar is 160993829805", "160993829805"),
    ("NATIONAL_ID", "주민등록번호: 200727-3370644", "200727-3370644"),
]
NOTHING = [
    "x[::2], rows[::abc] and y[1::3], std::bad",
    r"re.compile('\d{3}\n\t[0-9]+'), C:\new\table, \nu \tau \rho_{12}",
    "sections 2.1.3.4 and 10.4.1.2",
    "Ausweisnummer steht rechts; Personalausweis: L01X00T472",
    "Modules.name01.NativeFunctionsGenerated.method.some_long_attribute_name_of_nine",
    "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCk1JSURkekNDQWwrZ0F3SUJBZ0lFQWdBQXVUQU5CZ2s=",
    "aadhaar is asked for, and 160993829805 parcels came",
]


@pytest.mark.parametrize(("kind", "text", "value"), [*ESCAPED, *IN_LOGS, *NAMED])
def test_finds_the_value_where_it_stands(kind: str, text: str, value: str) -> None:
    start = text.index(value)

    assert find(text) == [(start, start + len(value), kind)]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_found_by_its_form_alone(key: str) -> None:
    text = f"look, `{key}` is there"

    assert find(text) == [(7, 7 + len(key), "SECRET")]


def test_a_long_key_of_a_cluster_is_found_whole() -> None:
    key = "Th80mrXxcVXW4y7VpYUVF9sKM3mPH6MN" * 60 + "=="

    assert find(f"    client-key-data: {key}\n") == [(21, 21 + len(key), "SECRET")]


@pytest.mark.parametrize("text", NOTHING)
def test_what_only_looks_alike_stays(text: str) -> None:
    assert [(text[start:end], kind) for start, end, kind in find(text)] == []
