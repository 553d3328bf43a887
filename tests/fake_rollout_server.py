"""A stand-in for `stages.rollout.server`: same environment and endpoints, no vLLM. Its misdeeds come as FAKE_* variables.

FAKE_START: "exit" (dies with a message), "noisy" (the same, then 42 lines of noise), "address" (as if vLLM had lost a port, once), "never" (never listens), "open"
(answers without a token), "slow" (half a second). FAKE_STOP: "stubborn" (ignores TERM). FAKE_CHILD=1 leaves a child
in a session of its own. FAKE_PREPARE, FAKE_COMMIT, FAKE_PROVE: a JSON list [status, body] to answer with, or "die".
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from stages.rollout.settings import ServerSettings

SETTINGS = ServerSettings.from_environment()
TOKEN = Path(SETTINGS.token_file).read_text().strip()
PROOF = {"max_difference": 1e-6, "tolerance": SETTINGS.proof_tolerance, "tokens": 2}
ANSWERS: dict[str, list[Any]] = {
    "prepare": [200, {"bytes": 123, "prepare_s": 0.001}],
    "commit": [200, {"proof": PROOF, "paused_s": 0.002, "swap_s": 0.001}],
    "prove": [200, {"proof": PROOF, "prove_s": 0.001}],
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(200, {"version": -1})

    def do_POST(self) -> None:
        what = self.path.removeprefix("/libra/")
        order = self.rfile.read(int(self.headers["Content-Length"]))
        print(f"order {what} {order.decode()}", flush=True)
        if what == "prepare":
            registration = json.loads((Path(SETTINGS.run_root) / "instances" / f"{SETTINGS.instance}.json").read_text())
            print(f"leases at prepare {registration['leases']}", flush=True)
        told = os.environ.get(f"FAKE_{what.upper()}", "")
        if told == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        self._answer(*(json.loads(told) if told else ANSWERS[what]))

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        if os.environ.get("FAKE_START") != "open" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            status, body = 401, {}
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing: the log is for what tests look for."""


def misbehave(start: str) -> None:
    if start == "exit":
        sys.exit("the model is made of cheese")
    if start == "noisy":
        noise = ["nanobind: leaked 40 types!", *[f' - leaked type "{index}"' for index in range(40)], " - ... skipped"]
        sys.exit("\n".join(["the model is made of cheese", *noise]))
    if start == "never":
        signal.pause()
    if start == "slow":
        time.sleep(0.5)
    if start == "address" and not (mark := Path(os.environ["FAKE_MARK"])).exists():
        mark.touch()
        sys.exit("OSError: [Errno 98] Address already in use")


def main() -> None:
    print(f"fake server {os.getpid()} starts from {SETTINGS.start_folder}", flush=True)
    if os.environ.get("FAKE_STOP") == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.environ.get("FAKE_CHILD"):
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    misbehave(os.environ.get("FAKE_START", ""))
    server = HTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=SETTINGS.listen_fd)
    server.server_activate()
    server.serve_forever()


if __name__ == "__main__":
    main()
