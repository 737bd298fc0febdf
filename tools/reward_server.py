#!/usr/bin/env python3
"""A reward server for flash-grpo: the standard library and your function.

    # my_reward.py
    def score(sample):
        return sum(map(sum, (frame.rgb for frame in sample.frames)))   # a number; any number of helpers

    python tools/reward_server.py --function my_reward:score --port 8000

Your function gets a `Sample` and returns a number, a dict {"value": number, "components": {name: number}}, or a list with one number
per frame, which flash-grpo aggregates as the recipe says. What it raises becomes an error of that sample, never a number. With --batch the
function gets a list of samples and returns a list.

Ready adapters, each of which needs its public package: --adapter hpsv3 | pickscore | clip | videoalign.

The protocol is in docs/rewards.md, its schema in docs/reward_protocol.schema.json. Only for networks you trust: there is no password.
"""

import argparse
import base64
import contextlib
import hashlib
import importlib
import io
import json
import math
import os
import struct
import sys
import tempfile
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROTOCOL = 1
# How long the body of a refused request is read for, so that the client is done writing and reads the answer.
DRAIN_SECONDS = 30
# What a function's failure looks like. SystemExit would end the thread of the request without a word.
RAISED = (Exception, SystemExit)


class Frame:
    """One frame: `rgb` is bytes [height, width, 3]."""

    def __init__(self, width, height, rgb):
        self.width, self.height, self.rgb = width, height, rgb

    def numpy(self):
        """A uint8 array [height, width, 3]."""
        import numpy

        return numpy.frombuffer(self.rgb, dtype=numpy.uint8).reshape(self.height, self.width, 3)

    def pil(self):
        """A Pillow image."""
        from PIL import Image

        return Image.frombytes("RGB", (self.width, self.height), self.rgb)

    def png(self):
        """A PNG file, with the standard library."""
        stride = 3 * self.width
        lines = b"".join(b"\0" + self.rgb[y * stride : (y + 1) * stride] for y in range(self.height))
        parts = [(b"IHDR", struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(lines, 1)), (b"IEND", b"")]
        chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, data) for kind, data in parts)


class Sample:
    """A video to score: prompt, fps, metadata (or None), frames, and the frames' numbers in the clip."""

    def __init__(self, message):
        self.id = message["id"]
        self.prompt = message["prompt"]
        self.fps = message["fps"]
        self.metadata = message.get("metadata")
        self.indices = message["frames"]["indices"]
        self.frames = decode_frames(message["frames"])

    def numpy(self):
        """A uint8 array [frames, height, width, 3]."""
        import numpy

        return numpy.stack([frame.numpy() for frame in self.frames])


def decode_frames(frames):
    width, height, size = frames["width"], frames["height"], frames["width"] * frames["height"] * 3
    if "path" in frames:
        with open(frames["path"], "rb") as file:
            images = [file.read(size) for _ in frames["indices"]]
    else:
        decode = {"raw": lambda data: data, "png": decode_png, "jpeg": decode_jpeg}[frames["encoding"]]
        images = [decode(base64.b64decode(text, validate=True)) for text in frames["data"]]
    if any(len(image) != size for image in images):
        raise ValueError(f"a frame does not have {height}x{width}x3 bytes")
    return [Frame(width, height, image) for image in images]


def decode_jpeg(data):
    try:
        from PIL import Image
    except ImportError:
        raise RuntimeError('JPEG frames need Pillow: `pip install pillow`, or encoding = "raw" in the recipe') from None
    return Image.open(io.BytesIO(data)).convert("RGB").tobytes()


def decode_png(data):
    """PNG with Pillow; without it, slower, PNG as flash-grpo writes it (8 bit RGB, not interlaced)."""
    try:
        from PIL import Image
    except ImportError:
        return decode_png_slowly(data)
    return Image.open(io.BytesIO(data), formats=("PNG",)).convert("RGB").tobytes()


def decode_png_slowly(data):
    """`decode_png` with the standard library."""
    at, width, height, packed = 8, 0, 0, []
    while at < len(data):
        (length,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        if kind == b"IHDR":
            width, height = struct.unpack(">II", data[at + 8 : at + 16])
        elif kind == b"IDAT":
            packed.append(data[at + 8 : at + 8 + length])
        at += length + 12
    lines, stride = zlib.decompress(b"".join(packed)), width * 3
    rows, above = [], bytes(stride)
    for start in range(0, height * (stride + 1), stride + 1):
        above = unfilter(lines[start], lines[start + 1 : start + 1 + stride], above)
        rows.append(above)
    return b"".join(rows)


def unfilter(kind, line, above):
    """A row without its filter, one of the five of PNG, for pixels of three bytes."""
    if kind == 0:
        return line
    if kind in (1, 2):
        return sums(kind, line, above)
    if kind not in (3, 4):
        raise ValueError(f"PNG has no filter {kind}")
    out = bytearray(len(line))
    for channel in range(3):
        values = zip(line[channel::3], above[channel::3])
        out[channel::3] = bytes(averages(values) if kind == 3 else paeth(values))
    return bytes(out)


def sums(kind, line, above):
    """Filters 1 and 2, sums with what is left or above, for all bytes of a row at once: a row is one integer, first byte lowest."""
    low = int.from_bytes(b"\x7f" * len(line), "little")
    high = low + int.from_bytes(b"\1" * len(line), "little")
    # Byte by byte modulo 256: no carry leaves a byte, as the top bits are added apart from the others.
    add = lambda a, b: ((a & low) + (b & low)) ^ ((a ^ b) & high)
    row = int.from_bytes(line, "little")
    if kind == 2:
        row = add(row, int.from_bytes(above, "little"))
    else:
        # Sums over 2, 4, 8, .. pixels.
        pixels = 1
        while 3 * pixels < len(line):
            row = add(row, row << 24 * pixels)
            pixels *= 2
    return row.to_bytes(len(line), "little")


def averages(values):
    """Filter 3 of a channel: pairs of a byte and the one above it."""
    left, out = 0, []
    for value, up in values:
        left = (value + (left + up >> 1)) & 255
        out.append(left)
    return out


def paeth(values):
    """Filter 4 of a channel: pairs of a byte and the one above it."""
    left, corner, out = 0, 0, []
    for value, up in values:
        by_left, by_up = up - corner, left - corner
        by_corner = abs(by_left + by_up)
        by_left, by_up = abs(by_left), abs(by_up)
        if by_left > by_up or by_left > by_corner:
            left = up if by_up <= by_corner else corner
        left = (value + left) & 255
        corner = up
        out.append(left)
    return out


def number(value):
    """A finite float; numpy and torch scalars are fine."""
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}, not a finite number")
    return value


def to_score(sample_id, result):
    """The protocol's score of what a function returned."""
    if isinstance(result, BaseException):
        return {"id": sample_id, "error": f"{type(result).__name__}: {result}"}
    try:
        if isinstance(result, dict):
            components = {str(name): number(value) for name, value in result.get("components", {}).items()}
            return {"id": sample_id, "value": number(result["value"]), "components": components}
        if isinstance(result, (list, tuple)):
            return {"id": sample_id, "frame_values": [number(value) for value in result]}
        return {"id": sample_id, "value": number(result)}
    except Exception as error:
        return {"id": sample_id, "error": f"{type(error).__name__}: {error}"}


class Scorer:
    """A function of samples, one call at a time: models on a GPU are not used by two threads at once."""

    def __init__(self, function, name, version, batch=False, max_batch=None, threads=False):
        self.function, self.batch = function, batch
        self.info = {"protocol": PROTOCOL, "name": name, "version": version}
        if max_batch:
            self.info["max_batch"] = max_batch
        self.lock = threading.Lock() if not threads else None

    def answer(self, request):
        if request.get("protocol") != PROTOCOL:
            raise ValueError(f"protocol {request.get('protocol')!r}, expected {PROTOCOL}")
        ids, samples = [message["id"] for message in request["samples"]], []
        for message in request["samples"]:
            try:
                samples.append(Sample(message))
            except Exception as error:
                samples.append(error)
        if self.lock:
            with self.lock:
                results = self.call(samples)
        else:
            results = self.call(samples)
        return {"scores": [to_score(sample_id, result) for sample_id, result in zip(ids, results)]}

    def call(self, samples):
        results = list(samples)
        good = [i for i, sample in enumerate(samples) if isinstance(sample, Sample)]
        if self.batch:
            try:
                values = list(self.function([samples[i] for i in good]))
                if len(values) != len(good):
                    raise ValueError(f"{len(values)} results for {len(good)} samples")
            except RAISED as error:
                values = [error] * len(good)
        else:
            values = [self.call_one(samples[i]) for i in good]
        for i, value in zip(good, values):
            results[i] = value
        return results

    def call_one(self, sample):
        try:
            return self.function(sample)
        except RAISED as error:
            return error


def handler(scorer, max_bytes):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Headers and body are two writes; without this, the second waits for the client's word about the first.
        disable_nagle_algorithm = True

        def do_GET(self):
            if self.path == "/health":
                self.send(200, {"status": "ok"})
            elif self.path == "/v1/info":
                self.send(200, {**scorer.info, "max_bytes": max_bytes})
            else:
                self.send(404, {"error": f"no {self.path}; there are /v1/score, /v1/info and /health"})

        def do_POST(self):
            length = int(self.headers.get("content-length") or 0)
            if self.path != "/v1/score":
                self.refuse(length, 404, f"no {self.path}; there are /v1/score, /v1/info and /health")
                return
            if length > max_bytes:
                mib, limit = -(-length >> 20), max_bytes >> 20
                cure = f"smaller batch_size, fewer frames, or --max-mib {mib} for the server"
                self.refuse(length, 413, f"the request has {mib} MiB, the limit is {limit} MiB: {cure}")
                return
            try:
                answer = scorer.answer(json.loads(self.rfile.read(length)))
            except Exception as error:
                self.send(400, {"error": f"{type(error).__name__}: {error}"})
                return
            self.send(200, answer)

        def refuse(self, length, status, reason):
            """Answers once the body is read: a client that is still writing would see a broken connection instead."""
            self.close_connection = self.close_connection or not self.drain(length)
            self.send(status, {"error": reason})

        def drain(self, length):
            """Reads and drops `length` bytes; whether they came in time."""
            end = time.monotonic() + DRAIN_SECONDS
            try:
                while length > 0:
                    self.connection.settimeout(max(end - time.monotonic(), 0))
                    part = self.rfile.read1(min(length, 1 << 20))
                    if not part or time.monotonic() > end:
                        return False
                    length -= len(part)
            except OSError:
                return False
            finally:
                self.connection.settimeout(None)
            return True

        def send(self, status, message):
            body = json.dumps(message, allow_nan=False).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            if self.close_connection:
                self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    return Handler


def load_function(spec):
    """`module:name`, and a version from the module's text."""
    module_name, _, name = spec.partition(":")
    module = importlib.import_module(module_name)
    function = getattr(module, name or "score", None)
    if not callable(function):
        raise SystemExit(f"`{spec}`: the module has no function `{name or 'score'}`")
    version = getattr(module, "VERSION", None)
    if version is None and getattr(module, "__file__", None):
        with open(module.__file__, "rb") as file:
            version = hashlib.sha256(file.read()).hexdigest()[:16]
    return function, spec, str(version)


def need(package, install):
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise SystemExit(f"this adapter needs the package `{package}` ({error})\nhint: {install}") from None


def inference_mode():
    """PyTorch's inference mode, for packages that do not enter it themselves; nothing where PyTorch is not loaded."""
    torch = sys.modules.get("torch")
    return torch.inference_mode() if torch else contextlib.nullcontext()


def package_version(package):
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def hpsv3(device):
    """HPSv3: human preference of each frame."""
    scorer = need("hpsv3", "pip install hpsv3 matplotlib tensorboard").HPSv3RewardInferencer(device=device)

    def score(sample):
        with tempfile.TemporaryDirectory() as folder:
            paths = [os.path.join(folder, f"{i}.png") for i in range(len(sample.frames))]
            for path, frame in zip(paths, sample.frames):
                with open(path, "wb") as file:
                    file.write(frame.png())
            with inference_mode():
                rewards = scorer.reward(prompts=[sample.prompt] * len(paths), image_paths=paths)
        return [float(reward[0]) for reward in rewards]

    return score, "hpsv3", f"hpsv3 {package_version('hpsv3')}"


def clip_like(model_name, processor_name, device, scale):
    transformers, torch = need("transformers", "pip install transformers torch pillow"), need("torch", "pip install torch")
    need("PIL", "pip install pillow")
    processor = transformers.AutoProcessor.from_pretrained(processor_name)
    model = transformers.AutoModel.from_pretrained(model_name).eval().to(device)

    def unit(features):
        # From transformers 5 on, an object with the projection inside.
        features = features if torch.is_tensor(features) else features.pooler_output
        return features / features.norm(dim=-1, keepdim=True)

    def score(sample):
        with inference_mode():
            images = [frame.pil() for frame in sample.frames]
            inputs = processor(text=[sample.prompt], images=images, return_tensors="pt", padding=True, truncation=True).to(device)
            text = unit(model.get_text_features(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]))
            image = unit(model.get_image_features(pixel_values=inputs["pixel_values"]))
            return (scale * (image @ text.T)[:, 0]).float().cpu().tolist()

    return score, model_name, f"{model_name} transformers {transformers.__version__}"


def pickscore(device):
    """PickScore / 26, as published training code scales it, of each frame."""
    return clip_like("yuvalkirstain/PickScore_v1", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K", device, 100.0 / 26.0)


def clip(device):
    """Cosine similarity of CLIP ViT-L/14 between the prompt and each frame."""
    return clip_like("openai/clip-vit-large-patch14", "openai/clip-vit-large-patch14", device, 1.0)


def videoalign(device):
    """VideoAlign (VideoReward): overall score of the clip, with visual quality, motion quality and text alignment as components."""
    path = os.environ.get("VIDEOALIGN_CHECKPOINT")
    if not path:
        raise SystemExit("set VIDEOALIGN_CHECKPOINT to the folder of the VideoReward checkpoint")
    path = os.path.realpath(path)
    imageio = need("imageio", "pip install imageio imageio-ffmpeg")
    inference = need("inference", "clone KwaiVGI/VideoAlign and start this server in its folder")
    scorer = inference.VideoVLMRewardInference(path, device=device)

    def score(sample):
        # Its reader takes files only: near lossless, so that the encoder is not what is scored.
        with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
            frames = [frame.numpy() for frame in sample.frames]
            imageio.mimwrite(file.name, frames, fps=sample.fps, codec="libx264", output_params=["-crf", "4"])
            with inference_mode():
                reward = scorer.reward([file.name], [sample.prompt], use_norm=True)[0]
        return {"value": reward["Overall"], "components": {key: reward[key] for key in ("VQ", "MQ", "TA")}}

    return score, "videoalign", f"videoalign {path}"


ADAPTERS = {"hpsv3": hpsv3, "pickscore": pickscore, "clip": clip, "videoalign": videoalign}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--function", metavar="MODULE:NAME", help="your function")
    what.add_argument("--adapter", choices=sorted(ADAPTERS), help="a public reward model")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 to be reached from other machines (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 lets the system choose (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="for adapters (default: %(default)s)")
    parser.add_argument("--batch", action="store_true", help="the function takes a list of samples and returns a list")
    parser.add_argument("--max-batch", type=int, help="samples of a request at most")
    parser.add_argument("--max-mib", type=int, default=1024, help="largest request (default: %(default)s)")
    parser.add_argument("--threads", action="store_true", help="call the function from several threads at once")
    parser.add_argument("--version", help="changes whenever values would (default: a hash of the module)")
    args = parser.parse_args()
    # Python begins with the folder of this file instead: modules of the current one, for functions and for adapters.
    sys.path.insert(0, os.getcwd())
    function, name, version = load_function(args.function) if args.function else ADAPTERS[args.adapter](args.device)
    scorer = Scorer(function, name, args.version or version, args.batch, args.max_batch, args.threads)
    server = ThreadingHTTPServer((args.host, args.port), handler(scorer, args.max_mib << 20))
    print(f"listening on http://{args.host}:{server.server_port}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
