"""Export a checkpoint for OpenVINO GenAI: `python openvino_genai_export.py CHECKPOINT FOLDER`, in its environment."""

import sys
from pathlib import Path

import openvino
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from transformers import AutoTokenizer


def main() -> None:
    """Export with weights in f32; the precision of the computation is chosen when the model is loaded."""
    checkpoint, folder = sys.argv[1], Path(sys.argv[2])
    OVModelForCausalLM.from_pretrained(checkpoint, export=True, compile=False, load_in_8bit=False).save_pretrained(
        folder
    )
    tokenizer, detokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(checkpoint), with_detokenizer=True)
    openvino.save_model(tokenizer, folder / "openvino_tokenizer.xml")
    openvino.save_model(detokenizer, folder / "openvino_detokenizer.xml")


if __name__ == "__main__":
    main()
