"""A reward server that misbehaves, by plain sockets so that it can misbehave below HTTP too.

    python chaos_server.py healthy | passing | lasting

`passing`: every fault that another attempt can help; an id that met three of them is served well. `lasting`: also answers that are wrong.
What happens is a function of the id and the number of the attempt. `GET /stats` says what was served.
"""

import base64
import hashlib
import json
import socket
import struct
import sys
import threading
import time

MODE = sys.argv[1]
SLOW, HANG, DOWN = 0.05, 30.0, 0.7
PASSING = ["slow", "500", "503", "429", "408", "reset", "reset-mid-body", "too-short", "garbage", "drip", "hang", "down"]
# A second of waiting each, so there are few of them.
RARE = {"drip": 12, "hang": 12, "down": 12}
LASTING = ["nan", "null", "error", "duplicate", "unknown", "missing", "huge", "endless", "cut-json", "400", "301", "text"]

lock = threading.Lock()
attempts, served, again, faults, late = {}, {}, 0, {}, set()
down_until = 0.0


def pick(sample_id, attempt):
    if MODE == "healthy" or attempt > 3:
        return "good"
    digest = hashlib.sha256(f"{sample_id} {attempt}".encode()).digest()
    if MODE == "lasting" and hashlib.sha256(sample_id.encode()).digest()[0] < 64:
        return LASTING[digest[1] % len(LASTING)]
    if digest[0] > 100:
        return "good"
    kind = PASSING[digest[1] % len(PASSING)]
    return "500" if kind in RARE and digest[2] % RARE[kind] else kind


def value(sample):
    data = b"".join(map(base64.b64decode, sample["frames"]["data"]))
    return sum(data) / len(data) / 255


def response(body, status="200 OK", length=None, more=""):
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{more}content-length: {len(body) if length is None else length}\r\n\r\n"
    return head.encode() + body


def reset(connection):
    """Closes with RST rather than FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def answer(connection, kind, samples):
    """Sends what `kind` says; whether the connection goes on."""
    global down_until
    scores = [{"id": sample["id"], "value": value(sample)} for sample in samples]
    good = json.dumps({"scores": scores}).encode()
    if kind in ("good", "slow"):
        time.sleep(SLOW if kind == "slow" else 0)
        connection.sendall(response(good))
        return True
    wrong = {
        "nan": {"scores": [{**score, "value": float("nan")} for score in scores]},
        "null": {"scores": [{**score, "value": None} for score in scores]},
        "error": {"scores": [{"id": score["id"], "error": "out of memory"} for score in scores]},
        "duplicate": {"scores": scores + scores},
        "unknown": {"scores": scores + [{"id": "somebody-else", "value": 1}]},
        "missing": {"scores": []},
    }
    statuses = {
        "500": "500 Internal Server Error",
        "503": "503 Service Unavailable",
        "429": "429 Too Many Requests",
        "408": "408 Request Timeout",
        "400": "400 Bad Request",
        "301": "301 Moved Permanently",
    }
    if kind in wrong:
        connection.sendall(response(json.dumps(wrong[kind]).encode()))
        return True
    if kind in statuses:
        more = {"503": "retry-after: 0\r\n", "301": "location: http://127.0.0.1:1/\r\n"}.get(kind, "")
        connection.sendall(response(b"{}", statuses[kind], more=more))
        return True
    if kind == "text":
        connection.sendall(response(b"<html>a proxy</html>"))
        return True
    if kind == "cut-json":
        connection.sendall(response(good[: len(good) // 2]))
        return True
    if kind == "garbage":
        connection.sendall(b"\x00\xff not http at all\r\n\r\n")
    elif kind == "too-short":
        connection.sendall(response(good, length=len(good) + 100))
    elif kind == "reset-mid-body":
        connection.sendall(response(good[: len(good) // 2], length=len(good)))
        time.sleep(0.01)
    elif kind == "hang":
        time.sleep(HANG)
    elif kind == "drip":
        connection.sendall(response(b"", length=10_000))
        for _ in range(int(HANG / 0.1)):
            connection.sendall(b" ")
            time.sleep(0.1)
    elif kind == "huge":
        connection.sendall(response(b"[", length=10**12))
        for _ in range(4096):
            connection.sendall(b"0," * (1 << 16))
    elif kind == "endless":
        connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(4096):
            connection.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
    elif kind == "down":
        with lock:
            down_until = time.monotonic() + DOWN
    reset(connection)
    return False


def handle(connection):
    global again
    file = connection.makefile("rb")
    try:
        while True:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                line = file.readline()
                if not line:
                    return
                head += line
            length = next((int(h.split(b":")[1]) for h in head.lower().split(b"\r\n") if h.startswith(b"content-length")), 0)
            body = file.read(length)
            if head.startswith(b"GET /stats"):
                with lock:
                    stats = {"requests": sum(attempts.values()), "served": len(served), "again": again, "faults": faults}
                connection.sendall(response(json.dumps(stats).encode()))
                continue
            start = time.monotonic()
            samples = json.loads(body)["samples"]
            key = samples[0]["id"]
            with lock:
                if time.monotonic() < down_until:
                    reset(connection)
                    return
                attempts[key] = attempts.get(key, 0) + 1
                kind = pick(key, attempts[key])
                faults[kind] = faults.get(kind, 0) + 1
                if key in served and key not in late:
                    again += 1
            on = answer(connection, kind, samples)
            if kind in ("good", "slow"):
                with lock:
                    served[key] = True
                    # On a busy machine the client may have given up before; then it is right to ask again.
                    if time.monotonic() - start > 0.5:
                        late.add(key)
            if not on:
                return
    except OSError:
        pass
    finally:
        connection.close()


def listen(port):
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


listener = listen(0)
port = listener.getsockname()[1]
print(f"listening on http://127.0.0.1:{port}", flush=True)
while True:
    if time.monotonic() < down_until:
        # Dead for a while: nobody listens.
        listener.close()
        time.sleep(max(0.0, down_until - time.monotonic()))
        listener = listen(port)
    listener.settimeout(0.05)
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        continue
    connection.settimeout(60)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threading.Thread(target=handle, args=(connection,), daemon=True).start()
