#!/usr/bin/env bash
# Puts ONNX Runtime's library and PP-OCR's networks into models/ocr/, from their PyPI packages: for `type = "ocr"` and its tests.
set -euo pipefail
cd "$(dirname "$0")/.."
target=models/ocr
if [ -s $target/recogniser.onnx ] && [ -s $target/detector.onnx ] && [ -s $target/libonnxruntime.so ]; then
    exit 0
fi
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$wheels" onnxruntime==1.* rapidocr-onnxruntime==1.4.4
mkdir -p $target
python3 - "$wheels" $target <<'PY'
import os, pathlib, sys, zipfile

wheels, target = map(pathlib.Path, sys.argv[1:])
wanted = {
    "capi/libonnxruntime.so.": "libonnxruntime.so",
    "capi/libonnxruntime.1": "libonnxruntime.dylib",
    "models/ch_PP-OCRv4_rec_infer.onnx": "recogniser.onnx",
    "models/ch_PP-OCRv4_det_infer.onnx": "detector.onnx",
}
for wheel in wheels.glob("*.whl"):
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            for part, file in wanted.items():
                if part in name:
                    unfinished = target / (file + ".tmp")
                    unfinished.write_bytes(files.read(name))
                    os.replace(unfinished, target / file)
PY
ls -l $target
