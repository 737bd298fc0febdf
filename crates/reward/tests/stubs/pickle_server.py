"""A server of the pickle protocol, with real pickles: the mean byte of each image, as floats or as numpy values.

    python pickle_server.py [floats | float32 | array | zero-dim | nan | short | evil | geneval]

As geneval it wants what the server of GenEval wants: JPEG, `meta_datas` with a `tag` each, and `only_strict`. What goes wrong is status 500 with a
traceback, as such servers have it. With STUB_KEY set, requests without that key are refused.
"""

import importlib.util
import os
import pickle
import struct
import sys
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SERVER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../../tools/reward_server.py")
spec = importlib.util.spec_from_file_location("reward_server", SERVER)
reward_server = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reward_server)

KEY = os.environ.get("STUB_KEY")
KIND = sys.argv[1] if len(sys.argv) > 1 else "floats"


class Evil:
    def __reduce__(self):
        return os.system, ("touch " + os.environ.get("EVIL_FILE", "evil"),)


def respond(values):
    if KIND in ("floats", "geneval"):
        return {"scores": values}
    if KIND == "nan":
        return {"scores": [float("nan")] + values[1:]}
    if KIND == "short":
        return {"scores": values[1:]}
    if KIND == "evil":
        return {"scores": values, "extra": Evil()}
    import numpy

    if KIND == "float32":
        return {"scores": [numpy.float32(value) for value in values]}
    if KIND == "zero-dim":
        return {"scores": [numpy.array([value]) for value in values]}
    return {"outputs": numpy.array(values)}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self):
        data = self.rfile.read(int(self.headers["content-length"]))
        if KEY and self.headers["authorization"] != f"Bearer {KEY}":
            return self.send(401, b"no such key")
        try:
            self.send(200, pickle.dumps(respond(self.values(pickle.loads(data)))))
        except Exception:
            self.send(500, traceback.format_exc().encode())

    def values(self, request):
        images, prompts, metadata = request["images"], request["prompts"], request["meta_datas" if KIND == "geneval" else "metadata"]
        assert len(images) == len(prompts) == len(metadata), (len(images), len(prompts), len(metadata))
        assert all(type(image) is bytes for image in images) and all(type(prompt) is str for prompt in prompts)
        if KIND == "geneval":
            assert request["only_strict"] is True and all(m["tag"] and m["prompt"] == p for m, p in zip(metadata, prompts))
            if not all(image.startswith(b"\xff\xd8") for image in images):
                raise OSError("not a JPEG")
            return [0.5] * len(images)
        assert metadata[0] in ({}, {"text": "é", "n": 3, "x": [1.5, None, True]}), metadata[0]
        values = []
        for image in images:
            if image[:2] == b"\xff\xd8":
                values.append(struct.unpack(">H", image[-2:])[0] / 65536)
            else:
                decoded = reward_server.decode_png(image)
                values.append(sum(decoded) / len(decoded) / 255)
        return values

    def send(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
