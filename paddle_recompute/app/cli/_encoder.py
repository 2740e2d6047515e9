"""``encode``, ``search``, ``export`` and ``convert``: what is done with a trained encoder."""

from __future__ import annotations

import json
from typing import Any

import click
from tqdm import tqdm

from paddle_recompute.app.cli._process import prepare_one_process
from paddle_recompute.app.launch import errors_in_one_paragraph
from paddle_recompute.errors import ConfigError


@click.command()
@click.option(
    "--model", "folder", required=True, metavar="FOLDER", help="The train.output_dir of a run."
)
@click.option("--output", required=True, metavar="FILE", help="A .npy file to write.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Texts encoded at once.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=2),
    help="Longer texts are cut; by default, at the limit of the positives in training.",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.argument("text_file")
def encode(
    folder: str, output: str, batch_size: int, max_tokens: int | None, debug: bool, text_file: str
) -> None:
    """Encode TEXT_FILE, one text per line, and write the vectors. It may be a .gz file.

    For example: paddle-recompute encode --model outputs/run --output pool.npy texts.txt

    After an interruption, run the same command again: it continues where it stopped. The last line
    on standard output is a record, one JSON object.
    """
    with errors_in_one_paragraph(debug, "interrupted; run the same command again to continue"):
        prepare_one_process()
        from paddle_recompute.app.retrieval import encode_file, load_encoder

        with tqdm(unit="text", desc="encode", disable=None) as bar:

            def show(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            record = encode_file(
                load_encoder(folder),
                text_file,
                output,
                batch_size=batch_size,
                max_tokens=max_tokens,
                progress=show,
            )
        click.echo(f"{record['texts']} texts, vectors of {record['dim']} numbers: {output}")
        for key, what in (
            ("cut", "texts cut at --max-tokens"),
            ("unknown", "texts with words that are not in the vocabulary"),
        ):
            if record[key]:
                click.echo(f"  {what}: {record[key]}")
        click.echo(json.dumps(record))


@click.command()
@click.option(
    "--index", "place", required=True, metavar="FILE|FOLDER", help="The output of `encode`."
)
@click.option("--model", "folder", metavar="FOLDER", help="The run, if it was moved.")
@click.option(
    "--top-k", type=click.IntRange(min=1), default=10, show_default=True, help="Texts per query."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per query and line.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.argument("queries", nargs=-1, required=True, metavar="QUERY...")
def search(
    place: str, folder: str | None, top_k: int, as_json: bool, debug: bool, queries: tuple[str, ...]
) -> None:
    """Show the texts nearest to each QUERY: rank, score (cosine), text.

    For example: paddle-recompute search --index pool.npy "a big cat"
    """
    with errors_in_one_paragraph(debug, "interrupted"):
        prepare_one_process()
        from paddle_recompute.app.retrieval import Index, load_encoder
        from paddle_recompute.app.retrieval import search as find

        index = Index(place)
        found = find(
            index,
            queries,
            top_k=top_k,
            encoder=load_encoder(folder) if folder else None,
            tell=lambda words: click.echo(f"paddle-recompute: {words}", err=True),
        )
        for query, hits in zip(queries, found, strict=True):
            if as_json:
                results = [hit.to_dict() for hit in hits]
                click.echo(json.dumps({"query": query, "results": results}, ensure_ascii=False))
                continue
            if len(queries) > 1:
                click.echo(query)
            for hit in hits:
                click.echo(f"{hit.rank:>3}  {hit.score:.4f}  {hit.text}")


@click.command()
@click.option(
    "--model", "folder", required=True, metavar="FOLDER", help="The train.output_dir of a run."
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["pdparams", "safetensors"]),
    default="pdparams",
    show_default=True,
    help="pdparams: for Paddle's own tools (paddle.load).",
)
@click.option("--output", required=True, metavar="FILE", help="The file to write.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def export(folder: str, file_format: str, output: str, debug: bool) -> None:
    """Write the weights of the newest checkpoint of FOLDER for other programs.

    For example: paddle-recompute export --model outputs/run --output encoder.pdparams
    """
    with errors_in_one_paragraph(debug, "interrupted"):
        if not output.endswith(f".{file_format}"):
            raise ConfigError(
                f"--output {output}: must end in .{file_format}, as --format {file_format} says"
            )
        prepare_one_process()
        from paddle_recompute.app.retrieval import load_encoder
        from paddle_recompute.weights import save_weights

        encoder = load_encoder(folder)
        save_weights(encoder.model, output)
        click.echo(f"{len(encoder.model.state_dict())} tensors of {encoder.folder}: {output}")


@click.command()
@click.option(
    "--to",
    "naming",
    required=True,
    type=click.Choice(["paddle_recompute", "paddlenlp", "huggingface"]),
    help="Whose names the new file has.",
)
@click.option(
    "--leave-out",
    multiple=True,
    metavar="PATTERN",
    help="Tensors that TARGET need not have, such as 'cls.*'.",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.argument("source")
@click.argument("target")
def convert(naming: Any, leave_out: tuple[str, ...], debug: bool, source: str, target: str) -> None:
    """Write the weights in SOURCE to TARGET under other names (.pdparams or .safetensors).

    For example: paddle-recompute convert --to huggingface model.pdparams model.safetensors

    SOURCE holds an encoder of this library, PaddleNLP's Ernie or Bert, or Hugging Face's BERT.
    It is a file, or a folder with model.safetensors.index.json. A tensor that has no name in TARGET
    (a head, a projection) is an error unless --leave-out names it. model.init_from reads all of
    these as they are.
    """
    with errors_in_one_paragraph(debug, "interrupted"):
        prepare_one_process()
        from paddle_recompute.weights import convert_weights

        count, unused = convert_weights(source, target, to=naming, leave_out=leave_out)
        without = f", without {', '.join(unused)}" if unused else ""
        click.echo(f"{count} arrays with the names of {naming}{without}: {target}")
