//! Networks that one sandbox leaves to the next: only those in which nobody has made a socket.

use std::time::Duration;

use crate::harness::{Output, Sandbox, Test, clear_away, content, end, sh, wait_for_exec};

pub(crate) const TESTS: &[Test] = &[
    ("networks::each_user_has_networks_of_its_own", each_user_has_networks_of_its_own),
    (
        "networks::an_unused_network_serves_again_and_one_call_at_a_time",
        an_unused_network_serves_again_and_one_call_at_a_time,
    ),
    ("networks::a_network_in_which_a_socket_was_made_ends", a_network_in_which_a_socket_was_made_ends),
    ("networks::local_sockets_leave_nothing", local_sockets_leave_nothing),
    ("networks::a_refused_socket_is_named_and_leaves_nothing", a_refused_socket_is_named_and_leaves_nothing),
    (
        "networks::a_network_that_serves_again_shows_what_a_new_one_does",
        a_network_that_serves_again_shows_what_a_new_one_does,
    ),
    ("networks::sockets_that_nobody_is_told_of_are_not_trusted", sockets_that_nobody_is_told_of_are_not_trusted),
];

const NAME: &str = "readlink /proc/self/ns/net";

fn network() -> String {
    sh("strict", NAME).run().success().to_owned()
}

fn python(policy: &'static str, script: &str) -> Output {
    Sandbox::new(
        policy,
        &["python3", "-c", &format!("import os, socket, threading\nprint(os.readlink('/proc/self/ns/net'))\n{script}")],
    )
    .run()
}

fn an_unused_network_serves_again_and_one_call_at_a_time() {
    let first = network();
    assert_eq!(network(), first);
    let (mut waiting, stdout, _stderr, _id) = sh("strict", &format!("{NAME}; sleep 600")).start();
    wait_for_exec(&mut waiting);
    let beside = network();
    end(&mut waiting, Duration::ZERO);
    assert_eq!(content(stdout).trim_end(), first);
    assert_ne!(beside, first, "two sandboxes have the same network at the same time");
    clear_away(waiting);
    assert_eq!(network(), first, "the one that was given back last");
}

fn a_network_in_which_a_socket_was_made_ends() {
    for script in [
        "socket.socket()",
        "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).close()",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
        "t = threading.Thread(target=socket.socket); t.start(); t.join()",
        "os.fork() or (socket.socket(), os._exit(0))\nos.wait()",
        "s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())",
    ] {
        let before = network();
        let output = python("workspace", script);
        assert_eq!(output.success(), before, "what is tested is a network that had served: {script}");
        assert_ne!(network(), before, "{script}");
    }
}

fn local_sockets_leave_nothing() {
    let before = network();
    let script = "s = socket.socket(socket.AF_UNIX); s.bind('\\0name'); s.listen(); socket.socketpair()\n\
                  c = socket.socket(socket.AF_UNIX); c.connect('\\0name')";
    for _ in 0..2 {
        assert_eq!(python("workspace", script).success(), before);
    }
    assert_eq!(network(), before);
}

fn a_refused_socket_is_named_and_leaves_nothing() {
    let before = network();
    let script = "try: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)\nexcept PermissionError: pass";
    let output = python("workspace", script);
    assert_eq!(output.success(), before);
    let denied: Vec<_> = output.finished.denied.iter().map(|denial| denial.detail.as_str()).collect();
    assert_eq!(denied, ["socket(0x11, 0x80003, 0x0)"]);
    assert_eq!(network(), before);
}

fn a_network_that_serves_again_shows_what_a_new_one_does() {
    let show = "readlink /proc/self/ns/net; cd /proc/net; for file in dev dev_mcast dev_snmp6/lo fib_trie icmp if_inet6 igmp igmp6 \
                ip6_flowlabel ipv6_route netstat packet protocols raw raw6 route rt6_stats rt_cache snmp snmp6 sockstat sockstat6 \
                tcp tcp6 udp udp6 udplite unix; do [ -r $file ] && echo $file && cat $file; done; true";
    let [fresh, served, again] =
        [sh("strict", show).making_network(), sh("strict", show), sh("strict", show)].map(|one| one.run());
    // Not `netlink`: it tells the kernel's own sockets by numbers of the host.
    let without_memory = |text: &str| {
        // These count the memory of all networks of the host together.
        let lines = text.lines().filter(|line| !line.starts_with("TCP") && !line.starts_with("UDP"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let [fresh, served, again] = [&fresh, &served, &again].map(|run| without_memory(run.success()));
    assert_eq!(served[0], again[0], "one network");
    assert_ne!(fresh[0], again[0]);
    let differing: Vec<_> = fresh.iter().zip(&again).skip(1).filter(|(fresh, again)| fresh != again).collect();
    assert!(differing.is_empty() && fresh.len() == again.len(), "{differing:#?}");
}

fn each_user_has_networks_of_its_own() {
    let network = |user| sh("strict", NAME).user(user).run().success().to_owned();
    let [first, second] = [network(1001), network(1002)];
    assert_ne!(first, second);
    assert_eq!([network(1001), network(1002)], [first, second]);
}

fn sockets_that_nobody_is_told_of_are_not_trusted() {
    let ring = "[[syscall]]\nallow = [\"io_uring_setup\"]\nwhy = \"x\"\n";
    let before = network();
    assert_eq!(sh("strict", NAME).rules(ring).run().success(), before);
    assert_ne!(network(), before);
}
