"""llama.cpp's converter without a vocabulary: `llama_cpp_convert.py SOURCES CHECKPOINT FILE`."""

from __future__ import annotations

import sys
from pathlib import Path


def main(sources: Path, checkpoint: Path, file: Path) -> None:
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    import gguf
    from conversion import (  # type: ignore[import-not-found]
        ModelBase,
        ModelType,
        get_model_architecture,
        get_model_class,
    )

    config = ModelBase.load_hparams(checkpoint, False)
    kind = get_model_class(get_model_architecture(config, ModelType.TEXT))
    # Tokens of a model with random weights say nothing.
    kind.set_vocab = lambda self: None
    kind(checkpoint, gguf.LlamaFileType.ALL_F32, file, hparams=config).write()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
