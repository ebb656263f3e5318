#!/bin/sh
# Runs what comes over the line: one command per line, in base64; each answer ends with a line that says its status.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8
for port in /sys/class/virtio-ports/*; do
    [ "$(cat "$port/name")" = agentd.control ] && device=/dev/${port##*/}
done
exec 3<> "$device"
echo '@@agentd ready' >&3
while read -r command <&3; do
    printf '%s' "$command" | base64 -d > /run/agentd-guest/command
    setsid sh /run/agentd-guest/command < /dev/null >&3 2>&1 3>&-
    printf '\n@@agentd status %s\n' "$?" >&3
done
