"""Writes OpenVINO models from the F16 GGUF: ``openvino-f16`` as it is, ``openvino-int8`` by NNCF.

Runs in OpenVINO's environment (with ``nncf``), after ``weights.py``: ``python openvino_export.py DIR``, where
DIR is what ``weights.py`` wrote. GenAI itself turns the GGUF into its own format; NNCF then makes all weights
int8, asymmetric, one scale a channel, which is what OpenVINO's own export tool does for ``int8``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nncf
import openvino
import openvino_genai as genai

MODEL = "openvino_model.xml"


def main(directory: Path) -> None:
    """Export what is missing in ``directory``."""
    plain, int8 = directory / "openvino-f16", directory / "openvino-int8"
    if not (plain / MODEL).exists():
        with tempfile.TemporaryDirectory(dir=directory) as staging:
            source = Path(staging) / "model.gguf"  # GenAI writes its model beside the file
            source.symlink_to((directory / "F16.gguf").resolve())
            scheduler = genai.SchedulerConfig()
            scheduler.num_kv_blocks = 16
            genai.ContinuousBatchingPipeline(
                str(source), scheduler, "CPU", {"enable_save_ov_model": True}, {}
            )
            plain.mkdir(exist_ok=True)
            for file in Path(staging).glob("openvino_model.*"):
                file.rename(plain / file.name)
    if not (int8 / MODEL).exists():
        model = openvino.Core().read_model(plain / MODEL)
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
        int8.mkdir(exist_ok=True)
        openvino.save_model(model, int8 / MODEL, compress_to_fp16=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]).expanduser())
