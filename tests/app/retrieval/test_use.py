"""The public names, run as their docstrings show them; prompts; ranks that encode one file.

And the commands that search, export and evaluate.
"""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from safetensors.numpy import load_file

import paddle_recompute
from paddle_recompute.app.config import DataConfig
from paddle_recompute.app.data import read_judged
from paddle_recompute.app.encoder import build_model
from paddle_recompute.app.retrieval import (
    Index,
    encode_batches,
    encode_file,
    encode_texts,
    load_encoder,
)
from paddle_recompute.app.retrieval import encoding as encode_module
from paddle_recompute.app.trainer import Trainer
from paddle_recompute.checkpoint import find_checkpoint
from paddle_recompute.errors import DataError, SyncError
from tests.app.commands import assert_refused, command
from tests.app.data.test_judged import written as write_judged
from tests.app.retrieval.test_evaluation import expected
from tests.app.trainer.test_trainer import tiny
from tests.app.trainer.trained_run import make_run, texts
from tests.distributed.mortal_ranks import results_of
from tests.ranks import ROOT

PROMPTS = {"model__query_prompt": "big query ", "model__document_prompt": "stone "}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With ``run``, ``prompted/run`` and ``texts.txt``."""
    folder = tmp_path_factory.mktemp("use")
    make_run(folder, of_words=True)
    make_run(folder / "prompted", **PROMPTS)
    (folder / "texts.txt").write_text("\n".join(texts(40)), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", ["load_encoder", "encode_texts", "Index"])
def test_examples_of_the_public_names_run(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").symlink_to(folder)
    documented = getattr(paddle_recompute, name).__doc__
    example = doctest.DocTestParser().get_doctest(documented, {}, name, None, 0)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


# ---------------------------------------------------------------------------------------- Index


def test_a_saved_index_is_what_encode_writes(folder: Path, tmp_path: Path) -> None:
    encoder = load_encoder(folder / "run")
    encode_file(encoder, folder / "texts.txt", tmp_path / "encoded.npy")
    vectors = encode_texts(encoder, texts(40))
    index = Index(vectors, texts(40), encoder=encoder)
    index.save(tmp_path / "saved.npy")
    for suffix in ("", ".txt"):
        saved, encoded = (tmp_path / f"{name}.npy{suffix}" for name in ("saved", "encoded"))
        assert saved.read_bytes() == encoded.read_bytes()
    record = json.loads((tmp_path / "encoded.npy.json").read_text())
    assert json.loads((tmp_path / "saved.npy.json").read_text()).items() <= record.items()
    queries = ["big cat", "tree"]
    hits = index.search(queries, top_k=7)
    assert Index.load(tmp_path / "saved.npy").search(queries, top_k=7) == hits
    scores, rows = index.top(vectors[:3], 1)
    np.testing.assert_array_equal(rows[:, 0], [0, 1, 2])
    np.testing.assert_allclose(scores[:, 0], 1, rtol=1e-6)


def test_a_damaged_checkpoint_is_told(tmp_path: Path) -> None:
    make_run(tmp_path)
    newest = tmp_path / "run" / "checkpoint" / "step-4"
    newest.mkdir()
    (newest / "manifest.json").write_text("{}")
    with pytest.warns(UserWarning, match=r"step-4/manifest.json: is damaged .* is used: step-3"):
        assert load_encoder(tmp_path / "run").step == 3


def test_vectors_of_no_model_are_searched_by_vectors(tmp_path: Path) -> None:
    vectors = np.eye(3, dtype=np.float64)
    Index(vectors, ["one", "two\nlines", "three"]).save(tmp_path / "own.npy")
    index = Index.load(tmp_path)
    assert index.top(vectors[1:2], 5)[1].tolist() == [[1, 0, 2]]
    assert index.texts([1]) == {1: "two lines"}
    with pytest.raises(DataError, match="the index names no model; give the encoder"):
        index.search(["two"])
    with pytest.raises(DataError, match=r"own.npy: is saved already; copy it"):
        index.save(tmp_path / "again.npy")


# --------------------------------------------------------------------------------------- prompts


def test_prompts_are_put_before_texts_of_their_side(folder: Path, tmp_path: Path) -> None:
    plain, encoder = load_encoder(folder / "run"), load_encoder(folder / "prompted" / "run")
    assert encoder.fingerprint != plain.fingerprint
    some = texts(40)
    for side, prompt, limit in (("query", "big query ", 10), ("document", "stone ", 12)):
        expected = encode_batches(
            encoder.model,
            encoder.tokenizer,
            [prompt + text for text in some],
            max_tokens=limit,
            batch_size=256,
        )
        given: Any = {"side": side}
        np.testing.assert_array_equal(encode_texts(encoder, some, **given), expected)
        assert not np.array_equal(encode_texts(plain, some, **given), expected)
        encode_file(encoder, folder / "texts.txt", tmp_path / f"{side}.npy", **given)
        np.testing.assert_array_equal(np.load(tmp_path / f"{side}.npy"), expected)
    with pytest.raises(DataError, match=r"was made with max_tokens=12 and prompt=stone "):
        encode_file(encoder, folder / "texts.txt", tmp_path / "document.npy", side="query")
    index = Index.load(tmp_path / "document.npy")
    as_document = index.search([some[5]], side="document", top_k=1)[0][0]
    assert (as_document.row, as_document.score) == (5, pytest.approx(1, abs=1e-6))
    assert index.search([some[5]], top_k=1)[0][0].score < 0.9999


def test_training_with_prompts_is_training_on_texts_that_begin_with_them(tmp_path: Path) -> None:
    """Weights, vocabulary and metrics: the same bits. Negatives are documents."""
    results = {}
    for name, in_texts in (("prompts", ("", "")), ("texts", (*PROMPTS.values(),))):
        made = tmp_path / name
        made.mkdir()
        query, document = in_texts
        lines = [
            f"{query}{one}\t{document}{one} house\t{document}{one} tree\n" for one in texts(60)
        ]
        (made / "pairs.tsv").write_text("".join(lines[:40]))
        (made / "valid.tsv").write_text("".join(lines[40:]))
        changes = PROMPTS if name == "prompts" else {}
        own = {"data__valid_file": str(made / "valid.tsv"), "data__pool_size": 20}
        own["data__valid_pairs"] = DataConfig.model_fields["valid_pairs"].default
        config = tiny(made, train__max_steps=3, contrastive__hard_negatives=1, **own, **changes)
        record = Trainer(config).run()
        checkpoint = find_checkpoint(config.train.output_dir / "checkpoint")
        weights = {name: one.tobytes() for name, one in load_file(checkpoint.weights_file).items()}
        metrics = {key: record[key] for key in ("loss", "mrr", "untrained_mrr", "ndcg@10")}
        results[name] = weights, metrics, checkpoint.tokenizer_file.read_bytes()
    assert results["prompts"] == results["texts"]


# ----------------------------------------------------------------------------------------- ranks


def encode_on_a_rank(folder: Path, output: Path) -> dict[str, Any]:
    encode_module._BATCHES_PER_BLOCK = 3
    encoder = load_encoder(folder / "run")
    return encode_file(encoder, folder / "texts.txt", output, batch_size=3, over_ranks=True)


def refused_and_encoded(folder: Path, output: Path) -> tuple[str, dict[str, Any]]:
    """What is said where the ranks read other texts, and the record of equal ones."""
    other = output.with_name("other.npy")
    own = output.with_name(f"texts-{dist.get_rank()}.txt")
    own.write_text("cat\n" * 2 + "dog\n" * (dist.get_rank() + 1))
    with pytest.raises(SyncError) as caught:
        encode_file(load_encoder(folder / "run"), own, other, over_ranks=True)
    return str(caught.value), encode_on_a_rank(folder, output)


def test_ranks_write_the_bytes_of_one_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "texts.txt").write_text("\n".join([*texts(40), "zebra", "cat " * 20]))
    monkeypatch.setattr(encode_module, "_BATCHES_PER_BLOCK", 3)
    alone, shared = tmp_path / "alone" / "pool.npy", tmp_path / "shared" / "pool.npy"
    encoder = load_encoder(folder / "run")

    def stop(done: int, total: int) -> None:
        if done == 18:
            raise KeyboardInterrupt

    # Begun by one process, continued by two ranks. The last block has one batch, one rank none.
    with pytest.raises(KeyboardInterrupt):
        encode_file(encoder, folder / "texts.txt", shared, batch_size=3, progress=stop)
    told, records = zip(*results_of(refused_and_encoded, folder=folder, output=shared), strict=True)
    assert all(one.startswith("the ranks' texts differ") for one in told)
    record = encode_file(encoder, folder / "texts.txt", alone, batch_size=3)
    assert (record["cut"], record["unknown"]) == (1, 1)
    assert records[0] == records[1]
    assert (records[0]["resumed_at"], records[0]["done"]) == (18, 42)
    for name in ("pool.npy", "pool.npy.txt", "pool.npy.json"):
        assert (shared.parent / name).read_bytes() == (alone.parent / name).read_bytes()


# --------------------------------------------------------------------------------------- command


def encode(folder: Path, texts: Path, output: Path) -> list[str | Path]:
    return ["encode", "--model", folder / "run", "--output", output, texts]


def test_errors_of_encode_and_search_are_one_paragraph(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, pool = folder / "texts.txt", tmp_path / "pool.npy"
    of_none = encode(tmp_path, given, pool)
    assert_refused(of_none, "contains no trained model", after="Encoding ")
    # A run that was moved
    command(*encode(folder, given, pool))
    about = tmp_path / "pool.npy.json"
    gone = {**json.loads(about.read_text()), "model": "/gone/checkpoint/step-3"}
    about.write_text(json.dumps(gone))
    search = ("search", "--index", tmp_path, "dog")
    assert_refused(search, "/gone/checkpoint: contains no trained model")
    command(*search, "--model", folder / "run")

    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paddle_recompute.app.retrieval.encoding.encode_texts", interrupt)
    result = command(*encode(folder, given, tmp_path / "other.npy"), code=130)
    assert "interrupted; run the same command again to continue" in result.stderr


def test_texts_are_encoded_and_found(folder: Path, tmp_path: Path) -> None:
    given, index = tmp_path / "texts.txt", tmp_path / "pool.npy"
    given.write_text("\n".join([*texts(30), "cat zebra"]))
    first, *notes, last = command(*encode(folder, given, index)).stdout.splitlines()
    assert first == f"31 texts, vectors of 16 numbers: {index}"
    assert notes == ["  texts with words that are not in the vocabulary: 1"]
    assert json.loads(last)["output"] == str(index)

    queries = [*texts(30), "big dog"]
    (tmp_path / "queries.txt").write_text("\n".join(queries) + "\n\n")
    search = ["search", "--index", str(index), "--top-k", "2"]
    found = command(*search, "--queries", tmp_path / "queries.txt", "--json").stdout
    lines = [json.loads(line) for line in found.splitlines()]
    assert [line["query"] for line in lines] == queries
    expected = Index.load(index).search(queries, top_k=2)
    assert [line["results"] for line in lines] == [
        [hit.to_dict() for hit in one] for one in expected
    ]
    shown = [line.split(maxsplit=2) for line in command(*search, "big dog").stdout.splitlines()]
    best = lines[-1]["results"]
    assert shown == [[str(hit["rank"]), f"{hit['score']:.4f}", hit["text"]] for hit in best]
    several = command(*search, "big cat", "dog").stdout.splitlines()
    assert [line.split()[0] for line in several] == ["big", "1", "2", "dog", "1", "2"]
    # In a process of its own, where Paddle is imported by the command, and says nothing.
    piped = subprocess.run(
        [sys.executable, "-m", "paddle_recompute", *search, "--queries", "-", "--json"],
        cwd=ROOT,
        input="\n".join(queries),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert piped.stderr == ""
    for one, written in zip(piped.stdout.splitlines(), lines, strict=True):
        # On an AMD CPU the command takes another path of MKL, which rounds otherwise.
        rows = [[hit["row"] for hit in one["results"]] for one in (json.loads(one), written)]
        assert rows[0] == rows[1]
    (tmp_path / "none.txt").write_text(" \n\n")
    none = command(*search, "--queries", tmp_path / "none.txt", "--json", code=2)
    assert "contains no query" in none.stderr
    both = command(*search, "--queries", "-", "cat", code=2).stderr
    assert "search needs either queries or --queries FILE" in both


def test_what_would_be_a_wrong_answer_is_refused(tmp_path: Path) -> None:
    vectors, some = np.eye(3, dtype=np.float32), ["a", "b", "c"]
    index = Index(vectors, some)
    for wrong in (np.nan, 1e300):
        with pytest.raises(DataError, match="not finite"):
            index.top(np.full((1, 3), wrong), 1)
        with pytest.raises(DataError, match="not finite"):
            Index(np.full((3, 3), wrong), some)
    with pytest.raises(DataError, match="inner products of these queries are not finite"):
        Index(vectors * 1e30, some).top(-vectors * 1e30, 3)
    index.save(tmp_path / "pool.npy")
    np.save(tmp_path / "pool.npy", np.asfortranarray([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]], "<f4"))
    scores, rows = Index.load(tmp_path / "pool.npy").top(vectors, 1)  # stored by columns
    assert scores.tolist() == [[7], [8], [9]] and rows.tolist() == [[2]] * 3
    np.save(tmp_path / "pool.npy", np.diag([1.0, np.nan, 1.0]).astype("<f4"))
    with pytest.raises(DataError, match="not finite"):
        Index.load(tmp_path / "pool.npy").top(vectors, 1)


def test_arguments_of_other_types_are_refused(folder: Path, tmp_path: Path) -> None:
    encoder = load_encoder(folder / "run")
    ones: Any = np.ones((1, 3))
    index, some = Index(ones, ["a"]), ["a"]
    calls: list[tuple[str, Any]] = [
        ("vectors of list; allowed is a numpy array", lambda: Index([[1.0]], some)),
        ("vectors of int64; allowed is", lambda: Index(ones.astype(int), some)),
        (r"vectors of shape \(1, 3\) and 2 texts", lambda: Index(ones, ["a", "b"])),
        ("encoder 'run'; load_encoder", lambda: encode_texts("run", some)),
        ("side='doc'; allowed are", lambda: encode_texts(encoder, some, side="doc")),
        ("text 'abc' in place of a list", lambda: Index(ones, "abc")),
        ("texts of generator; allowed is a list", lambda: Index(ones, (x for x in some))),
        ("text 0 is 3, of int; expected str", lambda: Index(ones, [3])),
        ("text 0 cannot be written as UTF-8", lambda: Index(ones, ["\udcff"])),
        ("received a blank query; give one or more queries", lambda: index.search(["cat", " "])),
        ("queries of list; allowed is", lambda: index.top([[1.0] * 3], 1)),
        (r"queries of shape \(1, 2\); allowed is \[n, 3\]", lambda: index.top(ones[:, :2], 1)),
        ("top_k=0; allowed are whole numbers", lambda: index.search(some, top_k=0)),
        ("batch_size=1.5; allowed are", lambda: encode_texts(encoder, some, batch_size=1.5)),
    ]
    for message, call in calls:
        with pytest.raises(DataError, match=rf"^(received )?(the )?{message}"):
            call()
    with pytest.raises(DataError, match=r"own.txt: allowed is a name that ends in .npy"):
        index.save(tmp_path / "own.txt")


# ------------------------------------------------------------------------------------------- export


def export(run: Path, file_format: str, output: Path) -> list[str | Path]:
    return ["export", "--model", run, "--format", file_format, "--output", output]


@pytest.mark.parametrize("file_format", ["pdparams", "safetensors"])
def test_the_file_holds_the_weights_and_a_new_model_reads_it(
    file_format: str, folder: Path, tmp_path: Path
) -> None:
    run, output = folder / "run", tmp_path / f"encoder.{file_format}"
    told = json.loads(command(*export(run, file_format, output), "--json").stdout)
    trained = load_encoder(run)
    state = {name: tensor.numpy() for name, tensor in trained.model.state_dict().items()}
    assert told["written"] == str(output) and told["tensors"] == len(state)
    other = command(*export(run, file_format, tmp_path / "encoder.npz"), code=2).output
    assert f"must end in .{file_format}" in other
    as_program = command(*export(run, "inference", output), code=2).output
    assert "names a file; --format inference needs a folder" in as_program
    (tmp_path / "file").touch()
    inside = tmp_path / "file" / output.name
    in_a_file = command(*export(run, file_format, inside), code=2).output
    assert "name another file or folder" in in_a_file and "cache_dir" not in in_a_file
    config = tiny(tmp_path, model__init_from=str(output))
    model = build_model(config.model, trained.tokenizer.vocab_size)
    written = paddle.load(str(output)) if file_format == "pdparams" else load_file(output)
    for tensors in (written, model.state_dict()):
        assert tensors.keys() == state.keys()
        for name, value in state.items():
            assert np.array_equal(tensors[name], value), name


# ----------------------------------------------------------------------------------------- evaluate


def test_a_run_is_evaluated(folder: Path, tmp_path: Path) -> None:
    """40 documents and 3 queries, of which one has the id of a document."""
    documents = [json.dumps({"_id": f"d{n}", "text": text}) for n, text in enumerate(texts(40))]
    queries = [
        json.dumps({"_id": name, "text": text})
        for name, text in (("d7", texts(40)[7]), ("b", "stone river"), ("c", "tree " * 20))
    ]
    grades = ["d7\td8\t2", "d7\td9\t1", "b\td20\t1", "c\td30\t3", "c\td31\t1", "c\td32\t2"]
    files = {"corpus": documents, "queries": queries, "test": grades}
    write_judged(tmp_path, **{name: "\n".join(lines) for name, lines in files.items()})
    evaluate = ("evaluate", "--model", folder / "run", "--data", tmp_path)
    record = json.loads(command(*evaluate, "--json", "--exclude-same-id").stdout)
    encoder, judged = load_encoder(folder / "run"), read_judged(tmp_path)
    query = encode_texts(encoder, judged.queries, side="query")
    pool = encode_texts(encoder, judged.pool)
    assert judged.same_id == [7, -1, -1]
    wanted = expected(query, pool, judged.answers, np.array(judged.same_id))
    every = expected(query, pool, judged.answers)
    assert wanted["map"] > every["map"]
    for name in ("map", "ndcg@10"):
        assert record["metrics"][name] == pytest.approx(wanted[name], abs=1e-12)
    assert {"recall@100", "precision@1", "mrr"} < set(record["metrics"])
    assert (record["queries"], record["pool_size"], record["judgements"]) == (3, 40, 6)
    assert record["notes"] == ["1 queries are cut after 10 tokens"]
    shown = command(*evaluate).stdout
    assert shown.startswith("3 queries, 40 candidates for each\n  1 queries are cut after 10 tok")
    assert f"\nmap           {every['map']:.4f}" in shown
    refused = command(*evaluate, "--split", "dev", code=2)
    assert "dev.tsv: there is no such file" in refused.stderr


def test_vectors_are_cut_everywhere(folder: Path, tmp_path: Path) -> None:
    """`truncate_dim` in encode, search, evaluate and export: the first numbers, of length 1."""
    run, file = folder / "run", tmp_path / "pool.npy"
    whole = encode_texts(load_encoder(run), texts(40))
    cut = encode_texts(load_encoder(run, truncate_dim=5), texts(40))
    first = whole[:, :5] / np.linalg.norm(whole[:, :5], axis=1, keepdims=True)
    np.testing.assert_allclose(cut, first, rtol=0, atol=1e-6)
    options = ("--model", run, "--truncate-dim", 5)
    text_file = tmp_path / "texts.txt"
    text_file.write_text("\n".join(texts(40)), encoding="utf-8")
    command("encode", *options, "--output", file, text_file)
    np.testing.assert_array_equal(np.load(file), cut)
    for model in ((), ("--model", run)):  # the index knows
        found = command("search", "--index", file, *model, "--side", "document", texts(40)[3])
        assert found.stdout.split("  ")[1:3] == ["1", f"1.0000  {texts(40)[3]}"[:6]]
    with pytest.raises(DataError, match="was encoded by another model"):
        Index.load(file).search(["cat"], encoder=load_encoder(run))
    command("export", *options, "--format", "inference", "--output", tmp_path / "served")
    program = paddle.jit.load(str(tmp_path / "served" / "encoder"))
    ids = load_encoder(run).tokenizer.encode(texts(3), 10)
    np.testing.assert_allclose(program(paddle.to_tensor(ids)).numpy(), cut[:3], rtol=0, atol=1e-5)
    (tmp_path / "pairs.tsv").write_text(f"{texts(40)[0]}\t{texts(40)[1]}\n")
    command("evaluate", *options, "--data", tmp_path / "pairs.tsv")
    for name, code in (("encoder.pdparams", "is for programs"), ("x.npy", "have 16 numbers")):
        what = ("export", "--output", tmp_path / name)
        if name == "x.npy":
            what = ("encode", "--output", tmp_path / name, text_file)
        assert code in command(*what, "--model", run, "--truncate-dim", 99, code=2).stderr
