"""What is done with a trained encoder: from ``encode`` to ``convert``."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from paddle_recompute.app.cli._process import (
    Option,
    as_json,
    command,
    number,
    prepare_one_of_ranks,
    prepare_one_process,
    progress,
    refused,
    tell_written,
)
from paddle_recompute.app.templates import render
from paddle_recompute.errors import ConfigError, DataError

if TYPE_CHECKING:
    from paddle_recompute.app.retrieval import TrainedEncoder

_QUERIES_AT_ONCE = 256
_WEIGHTS = (".pdparams", ".safetensors", ".bin")
_AGAIN = "interrupted; run the same command again to continue"

_of_run = click.option(
    "--model",
    "folder",
    required=True,
    metavar="FOLDER",
    help="The train.output_dir of a run, or a pretrained model (Hugging Face, PaddleNLP).",
)
_truncate_dim = number(
    "--truncate-dim", None, "Keep the first numbers of each vector, so many (Matryoshka)."
)
_batch_size = number("--batch-size", 256, "Texts encoded at once.")


def _show(command: str, record: dict[str, Any]) -> None:
    """Show people a record, in the words of the command."""
    file = Path(__file__).with_name(f"{command}.txt.j2")
    click.echo(render(file, **record), nl=False)


def _side(default: str) -> Option:
    return click.option(
        "--side",
        type=click.Choice(["query", "document"]),
        default=default,
        show_default=True,
        help="Whose prompt and limit the texts have, as in training.",
    )


@command(
    _of_run,
    click.option("--output", required=True, metavar="FILE", help="A .npy file to write."),
    _batch_size,
    number(
        "--max-tokens",
        None,
        "Longer texts are cut; by default, at the limit of their side in training.",
        least=2,
    ),
    _side("document"),
    _truncate_dim,
    click.argument("text_file"),
    interrupted=_AGAIN,
)
def encode(
    folder: str, output: str, text_file: str, truncate_dim: int | None, **options: Any
) -> None:
    """Write the vectors of a file of texts.

    For example: paddle-recompute encode --model outputs/run --output pool.npy texts.txt

    TEXT_FILE has one text per line; it may be a .gz file. After an interruption, run the same
    command again: it continues where it stopped. The last line on standard output is a record, one
    JSON object. Under fleetrun the ranks share the texts, and rank 0 writes.
    """
    rank = prepare_one_of_ranks(f"Encoding {text_file}")
    from paddle_recompute.app.retrieval import encode_file, load_encoder

    encoder = load_encoder(folder, truncate_dim=truncate_dim)
    with progress("text", "encode", is_shown=rank == 0) as show:
        record = encode_file(encoder, text_file, output, progress=show, over_ranks=True, **options)
    if rank:
        return
    _show("encode", record)
    click.echo(json.dumps(record))


@command(
    _of_run,
    click.option(
        "--data",
        required=True,
        metavar="FOLDER|FILE",
        help="corpus.jsonl, queries.jsonl and qrels/*.tsv, as in BEIR; or a file of pairs.",
    ),
    click.option("--split", default="test", show_default=True, help="The file in qrels."),
    click.option(
        "--exclude-same-id",
        is_flag=True,
        help="A document with the id of the query is no candidate for it (ArguAna, Quora).",
    ),
    click.option(
        "--strict",
        is_flag=True,
        help="Refuse judgements of unknown queries or documents, and repeated ones.",
    ),
    _truncate_dim,
    _batch_size,
    as_json,
)
def evaluate(
    folder: str,
    data: str,
    split: str,
    strict: bool,
    truncate_dim: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure retrieval on judged queries.

    For example: paddle-recompute evaluate --model outputs/run --data scifact

    Tells how well the encoder in FOLDER finds the judged answers. Each query is compared with every
    document: recall@k and precision@k, nDCG@10, MAP and MRR.
    """
    prepare_one_process(f"Evaluating {folder} on {data}")
    from paddle_recompute.app.data import read_judged
    from paddle_recompute.app.retrieval import evaluate_encoder, load_encoder

    judged = read_judged(data, split=split, strict=strict)
    encoder = load_encoder(folder, truncate_dim=truncate_dim)
    total = len(judged.queries) + len(judged.pool)
    with tqdm(total=total, unit="text", desc="encode", disable=None) as bar:
        record = evaluate_encoder(encoder, judged, progress=bar.update, **options)
    if as_json:
        click.echo(json.dumps(record))
    else:
        _show("evaluate", record)


@command(
    _of_run,
    click.option("--pairs", required=True, metavar="FILE", help="Pairs, .tsv or .jsonl."),
    click.option(
        "--pool",
        required=True,
        metavar="FILE",
        help="Texts, one per line; or the .npy file into which `encode` has encoded them.",
    ),
    click.option("--output", required=True, metavar="FILE", help="A .jsonl file to write."),
    number("--num-negatives", 5, "At most."),
    click.option(
        "--ranks",
        default="1:100",
        show_default=True,
        metavar="FIRST:LAST",
        help="How near to the query they are; 1 is the nearest text that is no positive.",
    ),
    click.option(
        "--margin",
        type=click.FloatRange(0, 2),
        help="Score at most that of the positive minus this.",
    ),
    click.option(
        "--relative-margin",
        type=click.FloatRange(0, 2),
        help="Score at most that of the positive minus this share of it.",
    ),
    _batch_size,
    refused(
        "--faiss", "is gone: the search is exact; remove it, or give a smaller --pool if it is slow"
    ),
    interrupted=_AGAIN,
)
def mine(
    folder: str,
    pairs: str,
    pool: str,
    output: str,
    ranks: str,
    batch_size: int,
    **options: Any,
) -> None:
    """Find hard negatives for pairs.

    For example: paddle-recompute mine --model outputs/run --pairs pairs.tsv --pool texts.txt
    --output mined.jsonl --margin 0.05

    Writes --pairs with texts of --pool as negatives; the search is exact. After an interruption,
    run the same command again: it continues where it stopped. The last line on standard output is a
    record, one JSON object.
    """
    first, colon, last = ranks.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal()):
        raise ConfigError(f"--ranks {ranks}: expected FIRST:LAST, as in 1:100")
    prepare_one_process(f"Searching {pool} for hard negatives of {pairs}")
    from paddle_recompute.app.retrieval import MiningOptions, load_encoder
    from paddle_recompute.app.retrieval import mine as find

    with progress("text") as show:
        record = find(
            load_encoder(folder),
            pairs,
            pool,
            output,
            MiningOptions(first_rank=int(first), last_rank=int(last), **options),
            batch_size=batch_size,
            progress=lambda what, done, total: show(done, total, what),
        )
    _show("mine", {**record, "output": output})
    click.echo(json.dumps(record))


@command(
    click.option(
        "--index", "place", required=True, metavar="FILE|FOLDER", help="The output of `encode`."
    ),
    click.option("--model", "folder", metavar="FOLDER", help="The model, if it was moved."),
    number("--top-k", 10, "Texts per query."),
    click.option(
        "--queries", "file", metavar="FILE", help="Queries, one per line; -: from standard input."
    ),
    _side("query"),
    click.option("--json", "as_json", is_flag=True, help="One JSON object per query and line."),
    refused("--output", "is gone: give --json, and write its lines to a file with > FILE"),
    click.argument("queries", nargs=-1, metavar="[QUERY]..."),
)
def search(
    place: str,
    folder: str | None,
    file: str | None,
    as_json: bool,
    queries: tuple[str, ...],
    **options: Any,
) -> None:
    """Show the texts nearest to a query.

    For example: paddle-recompute search --index pool.npy "a big cat"

    Or: paddle-recompute search --index pool.npy --queries queries.txt --json > found.jsonl

    Shows rank, score (cosine) and words of each text. 256 queries of a file are searched for at
    once.
    """
    if bool(queries) == bool(file):
        raise ConfigError("search needs either queries or --queries FILE")
    prepare_one_process(f"Searching {place}" if sys.stderr.isatty() else "")
    from paddle_recompute.app.retrieval import Index, load_encoder, texts_of

    index = Index.load(place)
    encoder = load_encoder(folder, truncate_dim=index.truncate_dim) if folder else None
    asked = texts_of(Path("/dev/stdin" if file == "-" else file)) if file else iter(queries)
    done = 0
    while block := list(itertools.islice(asked, _QUERIES_AT_ONCE)):
        found = index.search(block, encoder=encoder, tell=_tell, **options)
        for query, hits in zip(block, found, strict=True):
            if as_json:
                results = [hit.to_dict() for hit in hits]
                click.echo(json.dumps({"query": query, "results": results}, ensure_ascii=False))
                continue
            if file or len(queries) > 1:
                click.echo(query)
            for hit in hits:
                click.echo(f"{hit.rank:>3}  {hit.score:.4f}  {hit.text}")
        done += len(block)
    if not done:
        raise DataError(f"{file}: contains no query")


def _tell(words: str) -> None:
    click.echo(f"paddle-recompute: {words}", err=True)


def _parts(encoder: TrainedEncoder, output: str) -> dict[Path, TrainedEncoder]:
    """What is written where: of separate towers, in the folders ``query`` and ``document``."""
    parts, path = encoder.parts(), Path(output)
    if len(parts) == 1:
        return {path: encoder}
    folder, name = (path.parent, path.name) if path.suffix in _WEIGHTS else (path, "")
    for tower in parts:
        (folder / tower).parent.mkdir(parents=True, exist_ok=True)
        if name:
            (folder / tower).mkdir(exist_ok=True)
    return {folder / tower / name: part for tower, part in parts.items()}


@command(
    _of_run,
    click.option(
        "--format",
        "file_format",
        type=click.Choice(["pdparams", "safetensors", "inference", "onnx"]),
        default="pdparams",
        show_default=True,
        help="pdparams: weights for paddle.load. inference: a program for paddle.inference, with "
        "its tokenizer. onnx: for onnxruntime and sentence-transformers; needs paddle2onnx.",
    ),
    click.option(
        "--output",
        required=True,
        metavar="FILE|FOLDER",
        help="The file to write; with inference and onnx, the folder.",
    ),
    _truncate_dim,
    as_json,
)
def export(
    folder: str, file_format: str, output: str, truncate_dim: int | None, as_json: bool
) -> None:
    """Write the model for other programs.

    For example: paddle-recompute export --model outputs/run --output encoder.pdparams

    Or: paddle-recompute export --model outputs/run --format inference --output served

    The model is the newest checkpoint of FOLDER. Weights get their tokenizer and a config.json
    beside them, so that model.init_from and --model read them again. Separate towers
    (model.towers) are written into two folders, query and document.
    """
    is_program = file_format in ("inference", "onnx")
    if not is_program and not output.endswith(f".{file_format}"):
        raise ConfigError(
            f"--output {output}: must end in .{file_format}, as --format {file_format} says"
        )
    if is_program and output.endswith(_WEIGHTS):
        raise ConfigError(f"--output {output}: names a file; --format {file_format} needs a folder")
    if truncate_dim is not None and not is_program:
        raise ConfigError("--truncate-dim: is for programs (inference, onnx); weights are whole")
    prepare_one_process(f"Exporting {folder}")
    from paddle_recompute.app.retrieval import (
        load_encoder,
        write_inference,
        write_onnx,
        write_weights,
    )

    encoder = load_encoder(folder, truncate_dim=truncate_dim)
    parts = _parts(encoder, output)
    for path, part in parts.items():
        if is_program:
            (write_onnx if file_format == "onnx" else write_inference)(part, path)
        else:
            write_weights(part, path)
    paths = [*map(str, parts)]
    where, written = ", ".join(paths), paths if len(paths) > 1 else output
    if is_program:
        words = f"a program of {encoder.folder}, with its tokenizer: {where}"
        tell_written(written, words, as_json, checkpoint=str(encoder.folder))
        return
    count = len(encoder.model.state_dict())
    words = f"{count} tensors of {encoder.folder}, with tokenizer and config.json: {where}"
    tell_written(written, words, as_json, checkpoint=str(encoder.folder), tensors=count)


@command(
    click.option(
        "--to",
        "naming",
        required=True,
        type=click.Choice(["paddle_recompute", "paddlenlp", "huggingface"]),
        help="Whose names the new file has.",
    ),
    click.option(
        "--leave-out",
        multiple=True,
        metavar="PATTERN",
        help="Tensors that TARGET need not have, such as 'cls.*'.",
    ),
    as_json,
    click.argument("source"),
    click.argument("target"),
)
def convert(
    naming: Any, leave_out: tuple[str, ...], as_json: bool, source: str, target: str
) -> None:
    """Rename weights: ours, PaddleNLP, Hugging Face.

    For example: paddle-recompute convert --to huggingface model.pdparams model.safetensors

    Writes the weights in SOURCE to TARGET under other names (.pdparams or .safetensors), and their
    tokenizer beside it. With --to huggingface, SOURCE may be the folder of any model, and TARGET a
    new folder: it gets the configuration and the tokenizer too, for transformers and
    sentence-transformers.

    SOURCE holds an encoder of this library, PaddleNLP or Hugging Face.
    It is a file, or a folder with model.safetensors.index.json. A tensor that has no name in TARGET
    (a head, a projection) is an error unless --leave-out names it. model.init_from reads all of
    these as they are.
    """
    prepare_one_process(f"Converting {source}")
    from paddle_recompute.app.config import model_folder, tokenizer_beside
    from paddle_recompute.app.data import load_tokenizer
    from paddle_recompute.app.retrieval import load_encoder, write_hugging_face, write_tokenizer
    from paddle_recompute.weights import convert_weights

    is_of_file = any(Path(path).suffix in _WEIGHTS for path in (source, target))
    if naming == "huggingface" and not is_of_file:
        if leave_out:
            raise ConfigError("--leave-out: is for files; a folder holds the whole encoder")
        encoder = load_encoder(source)
        for place, part in _parts(encoder, target).items():
            write_hugging_face(part, place)
        words = f"model and tokenizer of {encoder.folder}: {target}"
        query, document = encoder.longest("query"), encoder.longest("document")
        if query != document and len(encoder.parts()) == 1:  # sentence-transformers has one limit
            words += f"\n  it cuts queries after {document} tokens, and training after {query}"
        tell_written(target, words, as_json, checkpoint=str(encoder.folder))
        return
    beside, found = tokenizer_beside(Path(source)), model_folder(Path(source))
    if beside is not None:
        pad_id = found.settings.get("pad_token_id", 0) if found is not None else 0
        write_tokenizer(load_tokenizer(beside, pad_id=pad_id), Path(target))
    count, unused = convert_weights(source, target, to=naming, leave_out=leave_out)
    without = f", without {', '.join(unused)}" if unused else ""
    tokenizer = "" if beside is None else ", with their tokenizer"
    words = f"{count} arrays with the names of {naming}{without}{tokenizer}: {target}"
    tell_written(target, words, as_json, arrays=count, left_out=[*unused])
