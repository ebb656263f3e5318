#!/bin/busybox sh
# The guest's first process: from the kernel to its disk, then either systemd or nothing but the control line.
/bin/busybox mount -t proc proc /proc
/bin/busybox --install -s /bin
export PATH=/bin
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs -o mode=755 tmpfs /run
while read -r module; do
    insmod "/modules/$module" || echo "cannot load $module"
done < /modules/order
fail() {
    echo "agentd-guest: $1"
    poweroff -f
}
word() {
    sed -n "s/.*\\bagentd\\.$1=\\([^ ]*\\).*/\\1/p" /proc/cmdline
}
tries=0
until [ -b /dev/vda ]; do
    tries=$((tries + 1))
    [ "$tries" -lt 200 ] || fail "there is no disk"
    sleep 0.1
done
mount -t ext4 /dev/vda /disk || fail "the disk cannot be mounted"
share() {
    mkdir -p "/disk/$2"
    mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=262144,cache=loose "$1" "/disk/$2" || fail "$2 is not shared"
}
share modules /lib/modules
share checkout "$(word checkout)"
[ -z "$(word target)" ] || share target "$(word target)"
mkdir -p /run/agentd-guest
cp /control /run/agentd-guest/control
if [ "$(word start)" = systemd ]; then
    mkdir -p /run/systemd/system/multi-user.target.wants
    cat > /run/systemd/system/agentd-guest.service <<UNIT
[Unit]
Description=The line to the machine that runs this guest
[Service]
ExecStart=/bin/sh /run/agentd-guest/control
StandardOutput=null
KillMode=process
UNIT
    ln -s ../agentd-guest.service /run/systemd/system/multi-user.target.wants/
else
    cat > /run/agentd-guest/init <<SCRIPT
#!/bin/sh
mount -t cgroup2 none /sys/fs/cgroup
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
hostname guest
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
# Children of children end up here and must be waited for, which a shell between two commands does not do.
exec python3 -c '
import os
if os.fork() == 0:
    os.setsid()
    os.execv("/bin/sh", ["sh", "/run/agentd-guest/control"])
while True:
    os.wait()
'
SCRIPT
    chmod 755 /run/agentd-guest/init
fi
for part in dev proc sys run; do
    mkdir -p "/disk/$part"
    mount --move "/$part" "/disk/$part"
done
if [ "$(cat /disk/proc/cmdline | grep -c 'agentd.start=systemd')" = 1 ]; then
    exec switch_root /disk /sbin/init
fi
exec switch_root /disk /run/agentd-guest/init
