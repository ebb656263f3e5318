//! What exists on the host for the probe's attempts to find: files, sockets, shared memory, names.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::path::PathBuf;
use std::process::Command;

use nix::mqueue::{MQ_OFlag, MqAttr, mq_close, mq_open, mq_unlink};
use nix::sys::stat::Mode;
use serde_json::json;

use crate::daemon::shown;
use crate::far_end::FarEnd;
use crate::site::{Site, chmod};

/// What exists outside for the attempts to find. It goes with this value.
pub struct Outside {
    /// By their names, as the probe takes them.
    pub facts: BTreeMap<String, String>,
    shared_memory: String,
    shared_file: PathBuf,
    queue: CString,
    _listener: TcpListener,
    /// A server that calls may list, as `web.test`.
    pub listed: FarEnd,
    _socket_file: UnixListener,
    _abstract: UnixListener,
    _abstract_datagram: UnixDatagram,
}

impl Outside {
    /// Makes it all, under names that no other site has.
    ///
    /// # Panics
    /// When something of it cannot be made.
    pub fn new(site: &Site) -> Self {
        let unique = site.folder().file_name().expect("a site has a name").to_string_lossy().into_owned();
        let secret = site.write("secret", b"the host's secret");
        let socket_file = site.path("host.sock");
        let served = UnixListener::bind(&socket_file).expect("a socket in the site's folder");
        chmod(&socket_file, 0o666);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let name = format!("{unique}-stream");
        let datagram_name = format!("{unique}-datagram");
        let shared_memory = run(Command::new("ipcmk").args(["-M", "4096", "-p", "0666"]));
        let shared_memory = shared_memory.split_whitespace().last().unwrap_or_default().to_owned();
        let table = fs::read_to_string("/proc/sysvipc/shm").expect("the kernel's table of shared memory");
        let row = table.lines().find(|line| line.split_whitespace().nth(1) == Some(&shared_memory));
        let key = row.and_then(|row| row.split_whitespace().next()).expect("the new shared memory's row").to_owned();
        let shared_file = PathBuf::from("/dev/shm").join(&unique);
        fs::write(&shared_file, "shared").expect("a file in /dev/shm");
        chmod(&shared_file, 0o666);
        let queue = CString::new(format!("/{unique}")).expect("a name without NUL");
        let mode = Mode::from_bits_truncate(0o666);
        let created =
            mq_open(queue.as_c_str(), MQ_OFlag::O_CREAT | MQ_OFlag::O_RDWR, mode, Some(&MqAttr::new(0, 4, 64, 0)));
        mq_close(created.expect("a message queue")).expect("an open queue");

        let mut facts = BTreeMap::new();
        let mut fact = |name: &str, value: String| facts.insert(name.to_owned(), value);
        fact("secret", secret.display().to_string());
        fact("state_dir", site.path("state").display().to_string());
        fact("socket_file", socket_file.display().to_string());
        fact("tcp_port", listener.local_addr().expect("a bound port").port().to_string());
        fact("abstract", name.clone());
        fact("abstract_datagram", datagram_name.clone());
        fact("shm_key", key);
        fact("shm_file", shared_file.display().to_string());
        fact("queue", unique);
        fact("pid", std::process::id().to_string());
        fact("environment", "must-not-leak".to_owned());
        fact("hostname", read("/proc/sys/kernel/hostname").trim().to_owned());
        fact("users", read("/etc/passwd").lines().count().to_string());
        for kind in ["mnt", "net", "ipc", "uts", "pid", "cgroup"] {
            let own = fs::read_link(format!("/proc/self/ns/{kind}")).expect("a namespace");
            fact(&format!("ns_{kind}"), own.display().to_string());
        }
        let listed = FarEnd::http();
        fact("listed_host", "web.test".to_owned());
        fact("listed_port", listed.port().to_string());
        fact("planted_symlink", "/workspace/planted".to_owned());
        fact("workspace_file", "/workspace/readable".to_owned());
        Self {
            facts,
            shared_memory,
            shared_file,
            queue,
            _listener: listener,
            listed,
            _socket_file: served,
            _abstract: UnixListener::bind_addr(&abstract_address(&name)).expect("an abstract socket"),
            _abstract_datagram: UnixDatagram::bind_addr(&abstract_address(&datagram_name)).expect("another one"),
        }
    }

    /// The facts as the probe takes them.
    pub fn json(&self) -> String {
        json!(self.facts).to_string()
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        let _ = Command::new("ipcrm").args(["-m", &self.shared_memory]).status();
        let _ = fs::remove_file(&self.shared_file);
        let _ = mq_unlink(self.queue.as_c_str());
    }
}

fn run(command: &mut Command) -> String {
    let output = command.output().expect("the command runs");
    assert!(output.status.success(), "{}", shown(&output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn abstract_address(name: &str) -> SocketAddr {
    SocketAddr::from_abstract_name(name).expect("a short name")
}
