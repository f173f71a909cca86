"""A program in place of `shapeshift serve`, for tests of who supervises nodes."""

from __future__ import annotations

import sys
from pathlib import Path

# It writes the record of a run, answers on its HTTP port, and ends a second after it was told to.
_SERVE = f"""#!{sys.executable}
import http.server, os, signal, sys, time
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from pathlib import Path
from shapeshift.triton.embedded import processes, run_record
given = dict(one.partition("=")[::2] for one in sys.argv)
run = Path(given["--build"]) / "nodes" / given["--node"] / "run"
if (run / "broken").exists():
    sys.exit("a model is missing")

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
own = processes.identify(os.getpid())
about = {{"host": "127.0.0.1", "ports": {{"http": server.server_port}}}}
record = run_record.Record(own, own, own, run_record.new_prefix(), about=about, boot=run_record.boot_id())
run_record.write(record, run / "server.json")

def stop(*_):
    time.sleep(0.3)
    os._exit(0)

signal.signal(signal.SIGTERM, stop)
server.serve_forever()
"""


def stub_program(folder: Path) -> str:
    """The path of the program, written to `folder`; it takes the place of `NodeCommand.python`."""
    program = folder / "python"
    program.write_text(_SERVE)
    program.chmod(0o755)
    return str(program)
