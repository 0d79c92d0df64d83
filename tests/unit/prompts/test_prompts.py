"""Prompt sets in every format, and the errors a person reads."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from digenrl.config import PromptSource
from digenrl.prompts import PromptError, load_prompts
from digenrl.prompts.records import derived_id
from digenrl.rewards.base import PromptRecord

DATASET = Path(__file__).parent / "hf-dataset"
#: Whatever a cell may hold, line breaks, commas and quotation marks included.
CELLS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def refused(path: Path, content: bytes, sentence: str) -> None:
    with pytest.raises(PromptError, match=f"{path.name}, {sentence}"):
        load_prompts(str(written(path, content)))


def test_shipped_sets_hold_the_numbers_and_share_none() -> None:
    train, held_out = load_prompts("package:numbers-train"), load_prompts("package:numbers-held-out")
    assert (len(train), len(held_out)) == (800, 200)
    both = [*train, *held_out]
    assert {p.text for p in both} == {f"{n:03d}" for n in range(1000)}
    assert all(p == PromptRecord(f"n{p.text}", p.text, {"target": p.text}) for p in both)


def test_jsonl_keeps_order_ids_and_fields(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"id": "b", "text": "zwölf", "target": "12"}\n\n{"text": " a cat "}\r\n', encoding="utf-8-sig")
    assert tuple(load_prompts(str(path))) == (
        PromptRecord("b", "zwölf", {"target": "12"}),
        PromptRecord(derived_id(" a cat "), " a cat ", {}),
    )


def test_text_files_hold_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "set.txt"
    path.write_bytes(b"a cat\r\n\n  a cat\na dog")
    cat, dog = derived_id("a cat"), derived_id("a dog")
    assert tuple(load_prompts(str(path))) == (
        PromptRecord(cat, "a cat"),
        PromptRecord(f"{cat}-2", "a cat"),
        PromptRecord(dog, "a dog"),
    )


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"{oops}", r"line 2: not JSON \(.*column 2\); expected an object such as"),
        (b'["042"]', r'line 2: \["042"\] is not a JSON object; expected'),
        (b'{"id": "b", "prompt": "042"}', r"line 2: has no 'text'; expected an object such as"),
        (b'{"id": "b", "text": "  "}', r"line 2: 'text' is blank; expected some text"),
        (b'{"id": "", "text": "042"}', r"line 2: 'id' is blank"),
        (b'{"id": "a", "text": "042"}', r"line 2: the id 'a' was already used in line 1; expected every id once"),
        (b'{"id": 7, "text": "042"}', r"line 2: 'id' is 7; expected a string, such as \"7\""),
        (b'{"id": "b", "text": "042", "target": 42}', r"line 2: 'target' is 42; expected a string, such as \"42\""),
        (b'{"id": "b", "text": "042", "bold": true}', r"line 2: 'bold' is true; expected a string$"),
        (b'{"id": "b", "text": null}', r"line 2: has no 'text'; expected an object such as"),
        (rb'{"id": "b", "text": "04\ud800"}', r"line 2: 'text' holds the lone surrogate U\+D800 as its character 3"),
        (rb'{"id": "b", "text": "042", "\udfff": "x"}', r"line 2: '\\udfff' holds the lone surrogate U\+DFFF as its"),
        (
            b'{"id": "text-0123456789abcdef", "text": "042"}',
            r"line 2: the id 'text-.*' is of the form that prompts without",
        ),
        (
            b'{"id": "b", "text": "042", "rewards": []}',
            r"line 2: 'rewards' names no reward; name at least one, or leave",
        ),
        (b'{"id": "b", "text": "042", "rewards": ["a", "a"]}', r"line 2: 'rewards' is .*; expected each name once"),
        (b'{"id": "b", "text": "042", "rewards": 3}', r"line 2: 'rewards' is 3; expected names of rewards, such as"),
        (b'{"id": "b", "text": "042", "more": ' + b"[" * 100_000, r"line 2: nested too deeply; expected an object"),
        ('{"id": "b", "text": "zwölf"}'.encode("latin-1"), r"line 2: byte 24 of the line \(0xf6\) is not UTF-8"),
    ],
)
def test_a_wrong_line_is_named_with_what_is_wrong_and_expected(tmp_path: Path, line: bytes, sentence: str) -> None:
    refused(tmp_path / "set.jsonl", b'{"id": "a", "text": "041"}\n' + line + b"\n", sentence)


def test_a_missing_file_is_answered_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").touch()
    with pytest.raises(PromptError, match=r"promts\.jsonl is not a file; did you mean .*/prompts\.jsonl\?"):
        load_prompts(str(tmp_path / "promts.jsonl"))
    with pytest.raises(PromptError, match=r"nowhere/promts\.txt is not a file$"):
        load_prompts(str(tmp_path / "nowhere" / "promts.txt"))


def test_an_unknown_package_set_is_answered_with_the_nearest() -> None:
    with pytest.raises(PromptError, match=r"package:number-train: .*did you mean numbers-train\?"):
        load_prompts("package:number-train")
    with pytest.raises(PromptError, match="numbers-held-out, numbers-train, scenes-held-out"):
        load_prompts("package:xyz")


@pytest.mark.parametrize("name", ["set.docx", "set"])
def test_another_kind_of_file_is_refused(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, b"a cat")
    with pytest.raises(
        PromptError, match=r"set.*: expected a file ending in \.txt, \.jsonl, \.csv, \.parquet, the dir"
    ):
        load_prompts(str(path))


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_an_empty_set_is_refused(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(PromptError, match="holds no prompts; expected at least one line"):
        load_prompts(str(written(tmp_path / f"set{suffix}", b"\n \n")))


def test_csv_rows_are_numbered_by_lines_and_empty_cells_are_absent(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbfid,text,target,rewards\r\na,"a cat, or\n""two""",,ocr other\r\n\r\n,b\xc3\xa5t,x,\r\n'
    prompts = load_prompts(str(written(tmp_path / "set.csv", content)))
    assert tuple(prompts) == (
        PromptRecord("a", 'a cat, or\n"two"', {}, ("ocr", "other")),
        PromptRecord(derived_id("båt"), "båt", {"target": "x"}),
    )
    assert [prompts.place(i).rpartition("/")[2] for i in range(2)] == ["set.csv, line 2", "set.csv, line 5"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"id,prompt\n1,a\n", r"line 1: the header 'id,prompt' has no column 'text'; its columns: id, prompt"),
        (b"text,text\na,b\n", r"line 1: the header 'text,text' holds a name twice"),
        (b"id,text\n1,a\n2,b,c\n", r"line 3: has 3 cells, the header 2; a cell that holds a comma needs double quotes"),
        (b"id,text\n1,a\n1,b\n", r"line 3: the id '1' was already used in line 2"),
        (b'id,text\n1,a\n2,"b\nc', r"line 4: unexpected end of data; expected comma-separated values in UTF-8"),
        (b"id,text\n1,b\xff\n", r"line 2: byte 4 of the line \(0xff\) is not UTF-8"),
    ],
)
def test_a_wrong_csv_file_is_named_with_its_line(tmp_path: Path, content: bytes, sentence: str) -> None:
    refused(tmp_path / "set.csv", content, sentence)


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=5))
def test_a_csv_file_gives_what_was_written(
    rows: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = [(text, other) for text, other in rows if text.strip()]
    out = io.StringIO(newline="")
    csv.writer(out).writerows([("text", "note"), *expected, ("last", "")])
    path = written(tmp_path_factory.mktemp("csv") / "set.csv", out.getvalue().encode())
    found = [(p.text, p.fields.get("note", "")) for p in load_prompts(str(path))]
    assert found == [*expected, ("last", "")]


def test_parquet_columns_of_text_are_read_and_others_left(tmp_path: Path) -> None:
    path = tmp_path / "set.parquet"
    texts = [f"picture {i}" for i in range(2500)]
    table = pa.table(
        {"id": range(2500), "caption": texts, "target": pa.array([None, *texts[1:]]), "size": [1.5] * 2500}
    )
    parquet.write_table(table, path, row_group_size=1000)
    prompts = load_prompts([PromptSource(path=str(path), text_key="caption")])
    assert len(prompts) == 2500 and prompts[0] == PromptRecord("0", "picture 0")
    assert prompts[-1] == PromptRecord("2499", "picture 2499", {"target": "picture 2499"})
    assert prompts.place(1).endswith("set.parquet, row 2")
    parquet.write_table(pa.table({"text": ["a", None]}), path)
    with pytest.raises(PromptError, match=r"set\.parquet, row 2: has no 'text'"):
        load_prompts(str(path))
    with pytest.raises(PromptError, match=r"set\.parquet: is no Parquet file"):
        load_prompts(str(written(path, b"PAR1 it is not")))


def test_a_hugging_face_dataset_is_read_from_disk() -> None:
    prompts = load_prompts([PromptSource(path=str(DATASET / "train"), text_key="prompt")])
    assert tuple(prompts) == (
        PromptRecord("a", 'a sign that reads "OPEN"', {"target": "OPEN"}, ("ocr",)),
        PromptRecord("b", "a cat", {}, ("jpeg_compressibility",)),
        PromptRecord(derived_id("a cat"), "a cat"),
        PromptRecord("d", "två hundar", {}, ("ocr", "jpeg_compressibility")),
    )
    with pytest.raises(PromptError, match=r"row 1: has no 'caption'; its keys: id, prompt, target"):
        load_prompts([PromptSource(path=str(DATASET / "train"), text_key="caption")])


def test_a_directory_with_splits_is_answered_with_their_names(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"give one of its splits: .*hf-dataset/test, .*hf-dataset/train$"):
        load_prompts(str(DATASET))
    with pytest.raises(PromptError, match=r"is no Hugging Face dataset \(it has no state\.json\)$"):
        load_prompts(str(tmp_path))


def test_a_dataset_whose_file_is_cut_off_is_named(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_bytes((DATASET / "test" / "state.json").read_bytes())
    name = "data-00000-of-00001.arrow"
    (tmp_path / name).write_bytes((DATASET / "test" / name).read_bytes()[:100])
    with pytest.raises(PromptError, match=f"{name} cannot be read"):
        load_prompts([PromptSource(path=str(tmp_path), text_key="prompt")])


def test_targets_come_from_quotation_marks_if_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path / "set.jsonl", '{"text": "“A” and \\"B\\""}\n{"text": "\'x\'", "target": "y"}\n'.encode())
    quoted = load_prompts([PromptSource(path=str(path), target="quoted")])
    assert [p.fields["target"] for p in quoted] == ["A B", "y"]
    assert "target" not in load_prompts(str(path))[0].fields, "never by itself"
    written(path, b'{"text": "\\"A\\""}\n{"text": "no sign"}\n')
    with pytest.raises(
        PromptError, match=r"set\.jsonl, line 2: nothing in the prompt stands in quotation marks; add a"
    ):
        load_prompts([PromptSource(path=str(path), target="quoted")])


def test_records_without_rewards_have_those_of_their_source(tmp_path: Path) -> None:
    path = written(tmp_path / "set.jsonl", b'{"text": "a"}\n{"text": "b", "rewards": "x, y"}\n')
    found = load_prompts([PromptSource(path=str(path), rewards=("ocr",))])
    assert [p.rewards for p in found] == [("ocr",), ("x", "y")]


def test_a_refused_record_is_named_with_its_line(tmp_path: Path) -> None:
    def check(record: PromptRecord) -> None:
        if record.uid == "b":
            raise ValueError("no b please")

    path = written(tmp_path / "set.jsonl", b'{"id": "a", "text": "a"}\n\n{"id": "b", "text": "b"}\n')
    with pytest.raises(PromptError, match=r"set\.jsonl, line 3: no b please$"):
        load_prompts(str(path), check)


def test_ids_are_unique_over_all_sources(tmp_path: Path) -> None:
    first, second = (
        written(tmp_path / name, b'{"id": "a", "text": "x"}\n{"text": "y"}\n') for name in ("1.jsonl", "2.jsonl")
    )
    with pytest.raises(PromptError, match=r"2\.jsonl, line 1: the id 'a' was already used in .*1\.jsonl, line 1;"):
        load_prompts([PromptSource(path=str(first)), PromptSource(path=str(second))])
    written(second, b'{"text": "y"}\n')
    uids = [p.uid for p in load_prompts([PromptSource(path=str(first)), PromptSource(path=str(second))])]
    assert uids == ["a", derived_id("y"), f"{derived_id('y')}-2"]


def test_a_file_that_is_overwritten_in_place_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "set.jsonl", b'{"id": "a", "text": "x"}\n{"id": "b", "text": "y"}\n')
    prompts = load_prompts(str(path))
    path.write_bytes(b'{"id": "c", "text": "x"}\n{"id"')
    for index, line in enumerate(("line 1", "line 2")):
        with pytest.raises(PromptError, match=f"{line}: changed while it was in use"):
            prompts[index]
    assert load_prompts([PromptSource(path=str(written(path, b'{"text": "new"}')))])[0].text == "new"


def test_a_set_is_a_sequence(tmp_path: Path) -> None:
    lines = [json.dumps({"id": str(i), "text": "x"}) for i in range(5)]
    prompts = load_prompts(str(written(tmp_path / "set.jsonl", "\n".join(lines).encode())))
    assert [p.uid for p in prompts[1:4:2]] == ["1", "3"] and prompts[-1].uid == "4"
    with pytest.raises(IndexError, match="prompt 5 of 5"):
        prompts[5]
