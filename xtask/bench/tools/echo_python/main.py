import json
import sys

request = json.load(sys.stdin)
json.dump({"protocol": 1, "call_id": request["call_id"], "ok": True, "result": request["arguments"]}, sys.stdout)
