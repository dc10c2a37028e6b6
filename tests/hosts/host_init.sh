#!/usr/bin/env bash
# host_init.sh NAME SHM_MIB SHARED READ_ONLY...: process 1 of a host, in namespaces of its own. It ends when its
# standard input does, and then the kernel ends all that runs on the host.
set -euo pipefail
name=$1 shm=$2 shared=$3
shift 3
mount -t sysfs sysfs /sys 2>/dev/null || true # that of this network
ip link set lo up
if [ -n "$name" ]; then
  hostname "$name"
  mount -t tmpfs -o "size=${shm}m" rl-shm /dev/shm
  for path in "$@"; do # no host writes where another would read it
    mount --rbind "$path" "$path"
    mount -o remount,bind,ro "$path" 2>/dev/null || true
  done
  mount -t tmpfs -o size=2048m rl-tmp /mnt
  mkdir -p /mnt/home
  for path in "$shared" "$@"; do # what all see may lie in /tmp
    case "$path" in /tmp/*)
      mkdir -p "/mnt/${path#/tmp/}"
      mount --rbind "$path" "/mnt/${path#/tmp/}" ;;
    esac
  done
  mount --move /mnt /tmp
  chmod 1777 /tmp
fi
echo ready
while read -r _; do :; done
