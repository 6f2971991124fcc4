"""What a script would start is found without running it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mds_train.migration.shell_reader import Reading, read_script
from mds_train.migration.shell_syntax import ScriptError
from mds_train.migration.shell_words import is_known, unknown_parts

SCRIPT = r"""#!/bin/bash
# A launch script with most of what such scripts use.
set -ex
LAYERS=4   # a comment
HIDDEN=$((LAYERS * 16))
ratio=`expr 1 + 1`
name="gpt-${LAYERS}L"
name+="-h$HIDDEN"
if [ "$WITH_BIAS" == "no" ] || [[ $LAYERS -gt 8 ]]; then
    BIAS="--disable-bias-linear"
elif [ $HIDDEN -eq 64 ]
then
    BIAS=""
else
    BIAS="--wrong"
fi
case $name in
    gpt-4*) STYLE=cosine ;;
    *) STYLE=linear ;;
esac
ARGS=(
    --num-layers $LAYERS      # in an array
    --hidden-size "$HIDDEN"
    --data-path "0.3 a 0.7 b"
)
ARGS+=(--save ${SAVE:-runs/$name})
config() {
  cat <<EOT > $1
{
  "train_batch_size": $(( 2 * 8 )),
  "zero_optimization": {"stage": ${ZERO:-1}}
}
EOT
}
config ds.json
OPTIONS=" \
    --lr-decay-style ${STYLE} \
    --deepspeed_config ds.json ${BIAS}"
for lr in 1e-3 1e-4; do
  run="torchrun --nproc_per_node 2 pretrain_gpt.py ${ARGS[@]} $OPTIONS --lr $lr --seed '7'"
  echo ${run}
  eval ${run} 2>&1 | tee log.txt
done
"""


def read(folder: Path, text: str, **given: str) -> Reading:
    path = folder / "run.sh"
    path.write_text(text)
    return read_script(path, given=given)


def test_a_script_with_most_of_what_they_use(tmp_path: Path) -> None:
    reading = read(tmp_path, SCRIPT)

    (launch,) = reading.launches
    assert launch.script == "pretrain_gpt.py"
    assert launch.launcher == ["torchrun", "--nproc_per_node", "2"]
    assert " ".join(launch.arguments) == (
        "--num-layers 4 --hidden-size 64 --data-path 0.3 a 0.7 b --save runs/gpt-4L-h64 "
        "--lr-decay-style cosine --deepspeed_config ds.json --lr 1e-3 --seed 7"
    )
    assert reading.files["ds.json"] == (
        '{\n  "train_batch_size": 16,\n  "zero_optimization": {"stage": 1}\n}\n'
    )
    line = SCRIPT.splitlines().index("for lr in 1e-3 1e-4; do") + 1
    assert reading.remarks == [f"Line {line}: of the loop, the first round was taken."]


def test_variables_from_outside_count(tmp_path: Path) -> None:
    reading = read(tmp_path, SCRIPT, ZERO="3", SAVE="elsewhere", WITH_BIAS="no")

    (launch,) = reading.launches
    assert "elsewhere" in launch.arguments
    assert "--disable-bias-linear" in launch.arguments
    assert '"stage": 3' in reading.files["ds.json"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash itself")
@pytest.mark.parametrize(
    "script",
    [
        'A="x  y"; set -- $A "$A" \'$A\' "${A}z" $A$A',
        'A=(1 "2 3" 4); set -- "${A[@]}" ${A[1]} ${#A[@]} "${A[*]}"',
        "P=/a/b/c.tar.gz; set -- ${P##*/} ${P%.gz} ${P%%.*} ${P#/a} ${#P} ${P/b/X}",
        'set -- ${NONE:-d e} "${NONE:-d e}" ${NONE-} ${HERE:+yes} a\\ b "q\\"q" "\\$A"',
        "N=5; set -- $((N * 2 + 1)) $(( ${N} % 3 )) $((N > 3 ? 1 : 0))",
        'X=a; X+=b; Y="$X"c; export Z=$Y; set -- $X $Y $Z',
        'f() { R="$1-$2"; }; f one "two three"; set -- "$R" $R',
        "if [ 3 -gt 2 ] && [ -n x ]; then V=yes; else V=no; fi; set -- $V",
        'V=b; case $V in a) W=1;; b|c) W=2;; esac; set -- $W; [ "$W" = "2" ]',
        'set -- $(echo hello   world) `echo x` "$(echo a   b)"',
        "A=1 # comment\nB=2; set -- $A \\\n  $B",
        "A='a\\\nb'; set -- \"$A\"",
    ],
)
def test_words_are_bashs(tmp_path: Path, script: str) -> None:
    """The same words as bash itself gives, which runs these harmless lines for comparison."""
    printed = subprocess.run(
        ["bash", "-c", f'HERE=1\n{script}\nprintf "%s\\0" "$@"'],
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split("\0")[:-1]
    lines = script.replace("set -- ", "python x.py --num-layers 1 ")

    (launch,) = read(tmp_path, lines, HERE="1").launches

    assert launch.arguments[2:] == printed


def test_what_only_a_machine_knows_stays_marked(tmp_path: Path) -> None:
    reading = read(
        tmp_path,
        "N=$(nvidia-smi | wc -l)\nrun='python pretrain_gpt.py --num-layers 2 --save /x/$(whoami)'\n"
        'if [ $N -gt 1 ]; then EXTRA="--bf16"; fi\neval "$run --seed $N $EXTRA"\n',
    )

    arguments = reading.launches[0].arguments
    assert unknown_parts(arguments[3]) == ["$(whoami)"]
    assert unknown_parts(arguments[5]) == ["$(nvidia-smi | wc -l)"]
    assert len(arguments) == 6
    assert all(is_known(word) for word in arguments[:3])
    assert reading.remarks == [
        "Line 3: the condition depends on the machine; its body was left out."
    ]


def test_a_quoted_text_ends_behind_what_only_a_machine_knows(tmp_path: Path) -> None:
    reading = read(
        tmp_path,
        'X=$(date)\nrun="python pretrain_gpt.py --save \\"a$X\\" --num-layers 2"\neval $run\n',
    )

    arguments = reading.launches[0].arguments
    assert unknown_parts(arguments[1]) == ["$(date)"]
    assert arguments[2:] == ["--num-layers", "2"]


def test_templates_filled_by_sed_and_sourced_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "template.json").write_text('{"train_batch_size": GBSIZE, "x": "a/MB"}\n')
    (tmp_path / "common.sh").write_text("LAYERS=6\n")
    reading = read(
        tmp_path,
        '. `pwd`/common.sh\ngbs=32\nsed "s/GBSIZE/${gbs}/" template.json \\\n'
        '  | sed "s#a/MB#b#" > ds_${gbs}.json\n'
        "deepspeed pretrain_gpt.py --num-layers $LAYERS --deepspeed_config ds_${gbs}.json\n",
    )

    assert reading.files["ds_32.json"] == '{"train_batch_size": 32, "x": "b"}\n'
    assert reading.launches[0].arguments[1] == "6"


def test_nothing_is_executed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("here")
    read(
        tmp_path,
        f"rm -f {victim}\nX=$(rm -f {victim})\nY=`rm -f {victim}`\n: > {victim}\n"
        f"eval rm -f {victim}\n(rm -f {victim})\nf() {{ rm -f {victim}; }}\nf\n"
        "python pretrain_gpt.py --num-layers 1\n",
    )

    assert victim.read_text() == "here"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('A="never closed', "run.sh: line 1: a quote is opened"),
        ("if true; then\nA=1\n", "fi is expected"),
        ("A=${B", "line 1: { is opened and never closed"),
        ("f() { f; }; f", "nested too deeply"),
        ("A=$B; " + 'A="$A$A"; ' * 3 + "eval eval eval " * 30 + "'x", "never closed"),
    ],
)
def test_what_is_not_understood_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ScriptError) as caught:
        read(tmp_path, text)

    assert message in str(caught.value)


def test_a_value_that_doubles_again_and_again_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match="beyond a megabyte"):
        read(tmp_path, "A=xxxxxxxx\n" + 'A="$A$A"\n' * 30)


def test_what_the_user_gives_counts_more_than_what_the_script_assigns(tmp_path: Path) -> None:
    text = """
CHECKPOINT_PATH=<Specify path>
host="${HOSTNAME}"
gpus=$(($(nvidia-smi --list-gpus | wc -l)-2))
per_rank=$(( 64 / gpus ))
unused=$(date)
name="gpt-${gpus}"
python pretrain_gpt.py --num-layers 2 --micro-batch-size $per_rank --save $CHECKPOINT_PATH/$name
"""

    reading, given = read(tmp_path, text), read(tmp_path, text, gpus="8", CHECKPOINT_PATH="runs")

    unknown = [part for word in reading.launches[0].words for part in unknown_parts(word)]
    assert reading.placeholders == ["CHECKPOINT_PATH"]
    assert reading.variables.behind(unknown) == ["gpus"]
    assert given.launches[0].arguments[2:] == ["--micro-batch-size", "8", "--save", "runs/gpt-8"]
    assert given.placeholders == []


def test_sed_puts_in_what_is_not_known_whole(tmp_path: Path) -> None:
    text = """
size=$(( $(nproc) / 2 ))
echo '{"train_batch_size": CONFIG_SIZE}' | sed "s/CONFIG_SIZE/${size}/" > ds.json
python pretrain_gpt.py --num-layers 2 --deepspeed_config ds.json
"""

    reading = read(tmp_path, text)

    written = reading.files["ds.json"]
    assert unknown_parts(written) == ["$(( $(nproc) / 2 ))"]
    assert written.startswith('{"train_batch_size": ')
    assert written.endswith("}\n")
