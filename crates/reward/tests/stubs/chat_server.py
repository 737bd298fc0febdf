"""A strict stand-in for an OpenAI-compatible server with a vision model: it refuses what the public API does not describe.

The judge says how bright the frames are: the mean byte of all images (PNG), in [0, 1].
"""

import base64
import importlib.util
import json
import math
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SERVER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../../tools/reward_server.py")
spec = importlib.util.spec_from_file_location("reward_server", SERVER)
reward_server = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reward_server)

KEY = os.environ.get("STUB_KEY")
MODEL = "judge-vl"


class Refused(Exception):
    pass


def want(condition, message):
    if not condition:
        raise Refused(message)


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def keys(value, required, optional, where):
    want(isinstance(value, dict), f"{where}: not an object")
    missing, unknown = set(required) - set(value), set(value) - set(required) - set(optional)
    want(not missing, f"{where}: missing {sorted(missing)}")
    want(not unknown, f"{where}: unknown {sorted(unknown)}")


def check(request):
    """The request's images, its text, and what is asked for."""
    optional = ["temperature", "max_tokens", "seed", "response_format", "logprobs", "top_logprobs"]
    keys(request, ["model", "messages"], optional, "request")
    want(request["model"] == MODEL, f"model {request['model']!r} does not exist")
    want(is_number(request.get("temperature", 1)) and 0 <= request.get("temperature", 1) <= 2, "temperature")
    want(isinstance(request.get("max_tokens", 1), int) and request.get("max_tokens", 1) >= 1, "max_tokens")
    want(isinstance(request.get("seed", 0), int), "seed")
    if "top_logprobs" in request:
        want(request.get("logprobs") is True, "top_logprobs needs logprobs")
        want(isinstance(request["top_logprobs"], int) and 0 <= request["top_logprobs"] <= 20, "top_logprobs must be 0 to 20")
    if "response_format" in request:
        check_format(request["response_format"])
    images, texts = [], []
    want(isinstance(request["messages"], list) and request["messages"], "messages")
    for message in request["messages"]:
        keys(message, ["role", "content"], ["name"], "message")
        want(message["role"] in ("system", "user", "assistant"), "role")
        if isinstance(message["content"], str):
            continue
        want(message["role"] == "user", "parts are for users")
        for part in message["content"]:
            if part.get("type") == "text":
                keys(part, ["type", "text"], [], "text part")
                texts.append(part["text"])
            else:
                keys(part, ["type", "image_url"], [], "image part")
                keys(part["image_url"], ["url"], ["detail"], "image_url")
                want(part["type"] == "image_url", "type")
                images.append(check_image(part["image_url"]["url"]))
    return images, "\n".join(texts)


def check_format(format):
    keys(format, ["type", "json_schema"], [], "response_format")
    want(format["type"] == "json_schema", "response_format.type")
    keys(format["json_schema"], ["name", "schema"], ["strict", "description"], "json_schema")
    schema = format["json_schema"]["schema"]
    want(schema.get("type") == "object" and schema.get("additionalProperties") is False, "strict schemas are closed objects")
    want(sorted(schema.get("required", [])) == sorted(schema.get("properties", {})), "strict schemas require every property")


def check_image(url):
    head, _, data = url.partition(",")
    want(head in ("data:image/png;base64", "data:image/jpeg;base64"), f"image url {head!r}")
    data = base64.b64decode(data, validate=True)
    if head == "data:image/png;base64":
        want(data.startswith(b"\x89PNG\r\n\x1a\n"), "not a PNG")
        return reward_server.decode_png(data)
    want(data.startswith(b"\xff\xd8") and data.endswith(b"\xff\xd9"), "not a JPEG")
    return data


def complete(request):
    images, text = check(request)
    want(images, "this judge wants images")
    values = b"".join(images)
    value = sum(values) / len(values) / 255
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": ""}}
    if request.get("logprobs"):
        choice["message"]["content"], choice["finish_reason"] = "Yes", "length"
        top = [("Yes", 0.6 * value), (" yes", 0.3 * value), ("No", 0.9 * (1 - value)), ("Maybe", 0.1)]
        top = [{"token": t, "logprob": math.log(max(p, 1e-30)), "bytes": list(t.encode())} for t, p in top][: request["top_logprobs"]]
        choice["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
    elif "response_format" in request:
        (field,) = request["response_format"]["json_schema"]["schema"]["properties"]
        choice["message"]["content"] = json.dumps({field: value})
    elif "undecided" in text:
        choice["message"]["content"] = "I would rather not say."
    else:
        choice["message"]["content"] = f"I see {len(images)} frames. Score: 0 would be unfair.\nFinal Score: {value!r}"
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [choice], "usage": usage}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        self.send(200, {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "x"}]})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        try:
            want(self.path == "/v1/chat/completions", self.path)
            want(self.headers["content-type"] == "application/json", "content-type")
            if KEY and self.headers["authorization"] != f"Bearer {KEY}":
                return self.send(401, {"error": {"message": "Incorrect API key provided", "type": "invalid_request_error", "code": None}})
            self.send(200, complete(json.loads(body)))
        except Refused as error:
            self.send(400, {"error": {"message": str(error), "type": "invalid_request_error", "param": None, "code": None}})

    def send(self, status, message):
        body = json.dumps(message).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
sys.stdout.close()
server.serve_forever()
