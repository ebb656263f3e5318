# The steps of `cargo xtask guest package`, run one by one in the guest, each by `set -eux`. $packages holds the packages of two
# revisions, $programs the programs that only tests use.

as() {
    user=$1
    shift
    runuser -u "$user" -- "$@"
}

# Waits for what another process does, on a machine that may be very slow.
eventually() {
    tries=0
    until "$@"; do
        tries=$((tries + 1))
        [ "$tries" -lt 600 ]
        sleep 0.5
    done
}

# What a command's status is that must fail.
status_of() {
    status=0
    "$@" >&2 || status=$?
    echo "$status"
}

# field JSON KEY…: what lies there in a JSON document.
field() {
    python3 -c '
import json, sys
value = json.loads(sys.argv[1])
for key in sys.argv[2:]:
    value = value[int(key) if isinstance(value, list) else key]
print(value if isinstance(value, str) else json.dumps(value))' "$@"
}

tool() {
    mkdir -p "/etc/agentd/tools/$1"
    cat > "/etc/agentd/tools/$1/tool.toml" << END
version = 1
name = "$1"
description = "A tool of a test."
[run]
runtime = "python"
entry = "main.py"
[contract]
input = "any.json"
$2
END
    echo '{"type":"object"}' > "/etc/agentd/tools/$1/any.json"
    {
        printf 'import json, os, subprocess, sys, time\nrequest = json.load(sys.stdin)\n'
        printf 'def reply(result):\n    print(json.dumps({"protocol": 1, "call_id": request["call_id"], "ok": True, "result": result}))\n'
        cat
    } > "/etc/agentd/tools/$1/main.py"
}

apt_install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends -o APT::Sandbox::User=root "$packages/agentd-$1.deb"
}

# A job in the middle of a call that never ends by itself; made again, the call ends at once. Its id is in /root/job.
held_job() {
    rm -rf /home/alice/held
    as alice mkdir /home/alice/held
    request='{"version":1,"agent":"worker","goal":{"do":"hold"},"workspace":"/home/alice/held"}'
    echo "$request" | as alice agentctl submit - > /root/job
    eventually holds
    as alice touch /home/alice/held/go
}

holds() {
    pgrep -f agentd-test-holds
}

# The job of /root/job goes on where it stood, and succeeds.
held_job_succeeds() {
    result=$(as alice agentctl --json result "$(cat /root/job)" --wait)
    [ "$(field "$result" status)" = success ]
    [ "$(field "$result" data done)" = true ]
}

step_install() {
    systemctl is-system-running --wait || systemctl --failed
    apt_install 1
    systemctl is-enabled agentd.socket agentd.service
    systemctl is-active agentd.socket
    [ "$(status_of systemctl is-active --quiet agentd.service)" != 0 ]
    [ "$(stat -c '%a %U %G' /run/agentd/agentd.sock)" = '660 root agentd' ]
    [ "$(stat -c '%a %U' /usr/libexec/agentd/agentd-launcher)" = '755 root' ]
    getent passwd agentd
    getent group agentd-admin
    [ "$(readlink /var/log/agentd)" = ../lib/agentd/audit ]
    man --where agentctl agentctl-submit agentd agentd-serve
    for file in bash-completion/completions/agentctl zsh/vendor-completions/_agentctl fish/vendor_completions.d/agentctl.fish; do
        grep -q submit "/usr/share/$file"
    done
    dpkg-query --show --showformat='${Conffiles}' agentd | grep /etc/agentd/agentd.toml
    [ -z "$(systemd-analyze verify --man=no agentd.service agentd.socket agentd.slice 2>&1 | grep -i agentd)" ]
    agentd check
    agentd check --config-dir /usr/share/agentd/examples/config
}

step_exposure() {
    # The threshold is in tenths.
    systemd-analyze security --no-pager --threshold=60 agentd.service
}

step_socket() {
    useradd --create-home --groups agentd alice
    useradd --create-home --groups agentd bob
    useradd --create-home mallory
    cp "$programs/scripted-model" /usr/local/bin/
    cat > /etc/agentd-test-model.toml << 'END'
order = "transcript"
[[conversations]]
when = "write"
[[conversations.turns]]
calls = [{ name = "note", arguments = {} }]
[[conversations.turns]]
text = '{"done":true}'
[[conversations]]
when = "hold"
[[conversations.turns]]
calls = [{ name = "held", arguments = {} }]
[[conversations.turns]]
text = '{"done":true}'
END
    cat > /etc/systemd/system/model.service << 'END'
[Service]
ExecStart=/usr/local/bin/scripted-model --listen 127.0.0.1:8080 /etc/agentd-test-model.toml
[Install]
WantedBy=multi-user.target
END
    systemctl enable --now model.service
    tool note '[execution]
mutates_workspace = true' << 'END'
open("note.txt", "w").write("written\n")
reply({})
END
    tool held '[execution]
mutates_workspace = true
[timeout]
after = "900s"' << 'END'
if not os.path.exists("go"):
    os.execv("/bin/sh", ["sh", "-c", ": agentd-test-holds; while :; do sleep 1000; done"])
reply({})
END
    tool hoards '[limits]
memory = "96MiB"
[timeout]
tier = "build"' << 'END'
kept = bytearray(request["arguments"]["mib"] << 20)
for at in range(0, len(kept), 4096):
    kept[at] = 1
reply({"kept": len(kept)})
END
    tool forks '[limits]
pids = 12
[timeout]
tier = "build"' << 'END'
children = [subprocess.Popen(["sleep", "1000"]) for _ in range(request["arguments"]["children"])]
reply({"children": len(children)})
END
    echo '{"type":"object"}' > /etc/agentd/any.json
    cat > /etc/agentd/agents/worker.toml << 'END'
version = 1
name = "worker"
description = "An agent of a test."
system_prompt = "Do what the goal says."
tools = ["note", "held"]
[model]
provider = "openai"
base_url = "http://127.0.0.1:8080/v1"
model = "scripted"
[goal]
schema = "../any.json"
[result]
schema = "../any.json"
[budget]
wall_seconds = 1800
END
    cat > /etc/agentd/policies/quarter.toml << 'END'
version = 1
name = "quarter"
extends = "strict"
adhoc = true
[limits]
why = "a test"
cpu = "0.25"
END
    agentd check
    [ "$(status_of systemctl is-active --quiet agentd.service)" != 0 ]
    # The first client starts it.
    as alice agentctl tools
    systemctl is-active agentd.service
    [ "$(systemctl show -P Slice agentd.service)" = agentd.slice ]
}

step_result() {
    as alice mkdir /home/alice/work
    as alice agentctl --json run worker --goal '{"do":"write"}' --workspace /home/alice/work > /root/first
    result=$(cat /root/first)
    [ "$(field "$result" status)" = success ]
    [ "$(stat -c '%U' /home/alice/work/note.txt)" = alice ]
    as alice agentctl receipts "$(field "$result" job_id)" --bundle /home/alice/bundle
    as alice agentctl verify /home/alice/bundle
}

step_refused() {
    [ "$(status_of as mallory agentctl jobs)" = 4 ]
    first=$(field "$(cat /root/first)" job_id)
    as alice agentctl show "$first"
    [ "$(status_of as bob agentctl show "$first")" = 2 ]
    as bob agentctl jobs
    [ -z "$(as bob agentctl --json jobs | grep "$first")" ]
    # Who may use it may still not work in a directory of somebody else.
    request='{"version":1,"agent":"worker","goal":{"do":"write"},"workspace":"/home/alice/work"}'
    [ "$(echo "$request" | status_of as bob agentctl submit -)" != 0 ]
}

step_limits() {
    reply=$(agentctl --json call hoards --args '{"mib":300}') || true
    [ "$(field "$reply" error code)" = OUT_OF_MEMORY ]
    agentctl --json call hoards --args '{"mib":20}'
    reply=$(agentctl --json call forks --args '{"children":40}') || true
    [ "$(field "$reply" error code)" = PROCESS_LIMIT ]
    agentctl --json call forks --args '{"children":4}'
    spin='import time
w, c = time.monotonic(), time.process_time()
while time.monotonic() - w < 4: pass
share = (time.process_time() - c) / (time.monotonic() - w)
print(share)
assert share <= 0.35, share'
    agentctl exec --policy quarter --timeout 120s -- python3 -c "$spin"
    # What ran out of memory was the call's, not the service's.
    systemctl is-active agentd.service
    [ "$(systemctl show -P NRestarts agentd.service)" = 0 ]
}

step_reload() {
    echo 'version = 1
name = "worker"
no_such_key = 1' > /etc/agentd/agents/broken.toml
    [ "$(status_of systemctl reload agentd.service)" != 0 ]
    journalctl --unit agentd.service --output cat | grep 'broken.toml:3'
    rm /etc/agentd/agents/broken.toml
    systemctl reload agentd.service
    as alice agentctl tools
}

step_restart() {
    held_job
    groups=$(systemd-cgls --no-pager --unit agentd.service)
    echo "$groups" | grep "agent-$(cat /root/job).slice"
    echo "$groups" | grep supervisor
    systemctl restart agentd.service
    held_job_succeeds
    # Log entries have fields.
    journalctl --unit agentd.service AGENTD_JOB="$(cat /root/job)" --output cat | grep 'job goes on'
    [ -z "$(systemd-cgls --no-pager --unit agentd.service | grep "agent-$(cat /root/job)")" ]
}

step_before_reboot() {
    held_job
}

step_after_reboot() {
    eventually systemctl is-active agentd.service
    held_job_succeeds
}

step_upgrade() {
    echo '# An administrator was here.' >> /etc/agentd/agentd.toml
    held_job
    before=$(systemctl show -P MainPID agentd.service)
    apt_install 2
    dpkg-query --show --showformat='${Version}' agentd | grep -- -2
    [ "$(systemctl show -P MainPID agentd.service)" != "$before" ]
    held_job_succeeds
    grep 'An administrator was here' /etc/agentd/agentd.toml
}

step_purge() {
    DEBIAN_FRONTEND=noninteractive apt-get purge -y -q agentd
    [ ! -e /run/agentd ]
    [ ! -e /usr/bin/agentd ]
    [ ! -e /etc/agentd/agentd.toml ]
    [ "$(status_of systemctl cat agentd.service agentd.socket)" != 0 ]
    [ -z "$(pgrep --list-name agentd)" ]
    # What an administrator wrote, and the evidence.
    [ -e /etc/agentd/agents/worker.toml ]
    [ -e /var/lib/agentd/receipt.pub ]
    [ -n "$(ls /var/lib/agentd/ledger)" ]
    [ ! -e /var/log/agentd ]
}

step_again() {
    apt_install 1
    result=$(as alice agentctl --json result "$(field "$(cat /root/first)" job_id)")
    [ "$(field "$result" status)" = success ]
    touch /var/lib/agentd/remove-on-purge
    DEBIAN_FRONTEND=noninteractive apt-get purge -y -q agentd
    [ ! -e /var/lib/agentd ]
}
