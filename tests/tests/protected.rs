//! Names that no call may create or change in a workspace, seen as a user of `agentctl exec` sees it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use agentd_tests::daemon::{Daemon, listing, shown};
use agentd_tests::site::Site;
use agentd_tests::{needs, requirement};

/// A workspace that has a repository at its top and one below, a start-up file, and links with protected names.
fn filled(site: &Site) -> PathBuf {
    let path = site.workspace("w", 0, 0);
    for repository in [".git", "sub/.git"] {
        fs::create_dir_all(path.join(repository).join("hooks")).unwrap();
        fs::write(path.join(repository).join("config"), "[core]\n").unwrap();
        fs::write(path.join(repository).join("HEAD"), "ref: refs/heads/main\n").unwrap();
    }
    fs::write(path.join(".bashrc"), "# mine\n").unwrap();
    fs::create_dir(path.join("dotfiles")).unwrap();
    fs::write(path.join("dotfiles/zshrc"), "# mine\n").unwrap();
    symlink("dotfiles/zshrc", path.join(".zshrc")).unwrap();
    path
}

fn run(daemon: &Daemon<'_>, workspace: &Path, script: &str) -> Output {
    daemon.exec(&["--policy", "workspace", "--workspace", workspace.to_str().unwrap()], &["sh", "-c", script], b"")
}

fn digest(daemon: &Daemon<'_>, workspace: &Path) -> Vec<u8> {
    daemon.agentctl(&["digest", workspace.to_str().unwrap()]).output().unwrap().stdout
}

#[test]
fn no_call_changes_a_protected_name_by_any_way() {
    needs!(requirement::root());
    let site = Site::new();
    let daemon = Daemon::start(&site);
    let workspace = filled(&site);
    let before = digest(&daemon, &workspace);
    // The call itself succeeds; its changes are not taken over, and the path is named with its rule.
    let vetoes = [
        ("echo x > sub/.git/hooks/post-commit", "sub/.git/hooks/post-commit", ".git/hooks"),
        ("echo x >> sub/.git/config", "sub/.git/config", ".git/config"),
        ("rm -r sub/.git", "sub/.git/config", ".git/config"),
        ("mv sub s; echo x > s/.git/hooks/a; mv s sub", "sub/.git/hooks/a", ".git/hooks"),
        ("mv sub elsewhere", "sub/.git/config", ".git/config"),
        ("echo x > fine; ln fine sub/.bashrc", "sub/.bashrc", ".bashrc"),
        ("mkdir -p deep/er; ln -s /tmp deep/er/.bashrc", "deep/er/.bashrc", ".bashrc"),
        ("mkdir .profile", ".profile", ".profile"),
        ("ln -s sub/.git g; echo x > g/hooks/a", "sub/.git/hooks/a", ".git/hooks"),
        ("echo x > dotfiles/zshrc", "dotfiles/zshrc", ".zshrc"),
        ("mkdir new; echo 'gitdir: ../sub' > new/.git", "new/.git", ".git"),
        ("mkdir -p new/.git/hooks; echo x > new/.git/hooks/pre-commit", "new/.git/hooks/pre-commit", ".git/hooks"),
    ];
    for (script, path, rule) in vetoes {
        let output = run(&daemon, &workspace, script);
        assert_eq!(output.status.code(), Some(125), "{script}: {}", shown(&output));
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            words.contains(&format!("`{path}`")) && words.contains(&format!("[[protect]] {rule}:")),
            "{script}: {words}"
        );
        assert!(words.contains("NOT_PERMITTED"), "{words}");
        assert_eq!(digest(&daemon, &workspace), before, "{script}");
    }
    // What exists at the top is refused at once.
    for script in ["echo x >> .bashrc", "echo x > .git/hooks/post-commit", "echo x >> .git/config", "rm .bashrc"] {
        let output =
            run(&daemon, &workspace, &format!("({script}) 2>/tmp/said; status=$?; cat /tmp/said; exit $status"));
        assert!(![Some(0), Some(125)].contains(&output.status.code()), "{script}: {}", shown(&output));
        let words = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(words.contains("Read-only") || words.contains("busy"), "{script}: {words}");
        assert_eq!(digest(&daemon, &workspace), before, "{script}");
    }
    // The twins: the same kinds of changes under names that are free.
    let free = "echo x > sub/.git/HEAD; echo x > hooks; mkdir -p deep/er; ln -s /tmp deep/er/bashrc; echo x > dotfiles/other; \
                echo x > .git/index; mkdir -p new/.git/hooks; echo x > new/.git/config; echo x > new/.git/hooks/a.sample";
    let output = run(&daemon, &workspace, free);
    assert_eq!(output.status.code(), Some(0), "{}", shown(&output));
    assert_ne!(digest(&daemon, &workspace), before);
    assert_eq!(
        listing(&workspace),
        [".bashrc", ".git", ".zshrc", "deep", "dotfiles", "hooks", "new", "sub"],
        "nothing but what calls made"
    );
    daemon.stop();
}

#[test]
fn git_works_in_what_a_call_makes() {
    needs!(requirement::root(), requirement::program("/usr/bin/git"));
    let site = Site::new();
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("w", 0, 0);
    let identity =
        "export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b HOME=/tmp; ";
    let first = "git init -q one && cd one && echo x > file && git add file && git commit -qm first && \
                 git remote add origin https://example.com/x.git && cd .. && git clone -q one two && cd two && git fsck";
    let output = run(&daemon, &workspace, &format!("{identity}{first}"));
    assert_eq!(output.status.code(), Some(0), "{}", shown(&output));
    // Work goes on in a repository that is there; only its configuration is closed.
    let second = "cd one && echo y > file && git commit -qam second && git branch side && git log --oneline | wc -l";
    let output = run(&daemon, &workspace, &format!("{identity}{second}"));
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), &b"2\n"[..]), "{}", shown(&output));
    let output = run(&daemon, &workspace, "cd one && git config core.hooksPath /tmp/evil");
    assert_eq!(output.status.code(), Some(125), "{}", shown(&output));
    let fsck = Command::new("/usr/bin/git")
        .args(["-c", "safe.directory=*", "-C"])
        .arg(workspace.join("one"))
        .args(["fsck", "--strict"])
        .output()
        .unwrap();
    assert!(fsck.status.success(), "{}", shown(&fsck));
    assert!(!fs::read_to_string(workspace.join("one/.git/config")).unwrap().contains("hooksPath"));
    daemon.stop();
}
