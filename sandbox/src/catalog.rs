//! Tools, runtimes and policies, read from directories that only root can write.
//!
//! The launcher reads them itself, so that no message of agentd's can say what a tool is or what a policy allows; agentd
//! reads the same files for names, descriptions and schemas.

mod entry;
mod folder;
mod runtime;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Instant;

use toolproto::digest::Digest;
use toolproto::extension::ExtensionManifest;
use toolproto::manifest::{ConfinedProgram, TlsMode, ToolManifest};
use toolproto::source::{FileError, alternatives, line_of_key};

use self::entry::Entry;
use self::folder::FolderAsRead;
pub use self::folder::FolderChanged;
pub use self::runtime::{MissingRuntime, Runtime};
use crate::config::{Config, Directories};
use crate::egress;
use crate::policy::Policy;
use crate::trusted::{self, Owners, TrustedDir};

/// The manifest's name within a tool's folder.
pub const MANIFEST: &str = "tool.toml";
/// The manifest's name within an extension's folder.
pub const EXTENSION_MANIFEST: &str = "extension.toml";
/// Where a tool's or extension's folder stands inside the sandbox.
pub const TOOL_FOLDER: &str = "/tool";

/// A tool of the catalogue.
#[derive(Clone, Debug)]
pub struct Tool {
    /// What it declares.
    pub manifest: ToolManifest,
    /// Its folder, without symbolic links.
    pub folder: PathBuf,
    /// The tree digest of its folder.
    pub digest: Digest,
    /// Why its calls fail, although its manifest is right. A program that has to be built first, or whose interpreter the host
    /// lacks, keeps its own tool from running, not the daemon from starting.
    pub hindrance: Option<FileError>,
    as_read: FolderAsRead,
}

/// An extension of the catalogue.
#[derive(Clone, Debug)]
pub struct Extension {
    /// What it declares.
    pub manifest: ExtensionManifest,
    /// Its folder, without symbolic links.
    pub folder: PathBuf,
    /// The tree digest of its folder.
    pub digest: Digest,
    /// Why it fails whenever it is asked, although its manifest is right.
    pub hindrance: Option<FileError>,
    as_read: FolderAsRead,
}

impl Tool {
    /// Looks whether its folder is still the one that its digest names.
    ///
    /// # Errors
    /// When it is not.
    pub fn confirm(&mut self, now: Instant) -> Result<(), FolderChanged> {
        self.as_read.confirm(&self.folder, now)
    }
}

impl Extension {
    /// Looks whether its folder is still the one that its digest names.
    ///
    /// # Errors
    /// When it is not.
    pub fn confirm(&mut self, now: Instant) -> Result<(), FolderChanged> {
        self.as_read.confirm(&self.folder, now)
    }
}

/// Everything that can be run, and under what.
#[derive(Clone, Debug)]
pub struct Catalog {
    /// By name.
    pub tools: BTreeMap<String, Tool>,
    /// By name.
    pub extensions: BTreeMap<String, Extension>,
    /// By name; those that tools may name, whether or not they are installed.
    pub runtimes: BTreeMap<String, Result<Runtime, MissingRuntime>>,
    /// By name.
    pub policies: BTreeMap<String, Policy>,
}

impl Catalog {
    /// The programs of all tools and extensions.
    pub fn programs(&self) -> impl Iterator<Item = &ConfinedProgram> {
        let tools = self.tools.values().map(|tool| &tool.manifest.program);
        tools.chain(self.extensions.values().map(|extension| &extension.manifest.program))
    }

    /// Why calls of tools fail, or extensions whenever they are asked, although nothing is refused.
    pub fn hindrances(&self) -> impl Iterator<Item = &FileError> {
        let tools = self.tools.values().filter_map(|tool| tool.hindrance.as_ref());
        tools.chain(self.extensions.values().filter_map(|extension| extension.hindrance.as_ref()))
    }

    /// The policy under which runtimes are tried: the strictest that there is.
    #[must_use]
    pub fn strictest(&self) -> Option<&Policy> {
        self.policies.get("strict").or_else(|| self.policies.values().next())
    }

    /// Reads everything that the configuration names.
    ///
    /// # Errors
    /// Every file that is wrong, with line and reason.
    pub fn load(config: &Config, owners: Owners) -> Result<Self, Vec<FileError>> {
        let mut errors = Vec::new();
        let runtimes = runtime::look_up(&config.runtimes, owners);
        let policies = load_policies(&config.paths.policies, owners).unwrap_or_else(|found| {
            errors.extend(found);
            BTreeMap::new()
        });
        let around = Surroundings { runtimes: &runtimes, policies: &policies, owners };
        let mut tools = BTreeMap::new();
        let mut extensions = BTreeMap::new();
        for (directory, name) in folders(&config.paths.tools, owners, &mut errors) {
            match load_tool(&directory, &name, &around) {
                Ok(None) => {}
                Ok(Some((tool, text))) => {
                    let file = tool.folder.join(MANIFEST);
                    errors.extend(around.unmet(&tool.manifest.program, &file, &text));
                    let name = tool.manifest.name.clone();
                    if let Some(earlier) = tools.insert(name.clone(), tool) {
                        let reason = format!("tool `{name}` stands in {} too", earlier.folder.display());
                        errors.push(FileError::whole(&file, reason));
                    }
                }
                Err(error) => errors.push(error),
            }
        }
        for (directory, name) in folders(&config.paths.extensions, owners, &mut errors) {
            match load_extension(&directory, &name, &around) {
                Ok(None) => {}
                Ok(Some((extension, text))) => {
                    let file = extension.folder.join(EXTENSION_MANIFEST);
                    errors.extend(around.unmet(&extension.manifest.program, &file, &text));
                    let name = extension.manifest.name.clone();
                    if let Some(earlier) = extensions.insert(name.clone(), extension) {
                        let reason = format!("extension `{name}` stands in {} too", earlier.folder.display());
                        errors.push(FileError::whole(&file, reason));
                    }
                }
                Err(error) => errors.push(error),
            }
        }
        for tool in tools.values() {
            if let Some(fallback) = &tool.manifest.retry.fallback
                && !tools.contains_key(fallback)
            {
                let reason = unknown("fallback", fallback, tools.keys());
                errors.push(FileError::whole(&tool.folder.join(MANIFEST), reason));
            }
        }
        if errors.is_empty() { Ok(Self { tools, extensions, runtimes, policies }) } else { Err(errors) }
    }
}

/// What lies in the directories of a list, each entry with its directory.
fn folders(list: &Directories, owners: Owners, errors: &mut Vec<FileError>) -> Vec<(Rc<TrustedDir>, OsString)> {
    let mut found = Vec::new();
    for directory in directories(list, owners, errors) {
        match directory.names() {
            Ok(names) => {
                let directory = Rc::new(directory);
                found.extend(names.into_iter().map(|name| (Rc::clone(&directory), name)));
            }
            Err(error) => errors.push(error.about(directory.path())),
        }
    }
    found
}

/// Opens the directories of a list. A missing default is skipped, a missing named one is an error.
fn directories(list: &Directories, owners: Owners, errors: &mut Vec<FileError>) -> Vec<TrustedDir> {
    let mut found = Vec::new();
    for path in &list.list {
        match TrustedDir::open(path, owners) {
            Ok(directory) => found.push(directory),
            Err(error) if error.is_missing() && !list.named => {}
            Err(error) => errors.push(error.about(path)),
        }
    }
    found
}

/// Reads the policy files. A file of a later directory stands for one of the same name in an earlier one.
fn load_policies(list: &Directories, owners: Owners) -> Result<BTreeMap<String, Policy>, Vec<FileError>> {
    let mut errors = Vec::new();
    let mut files: BTreeMap<OsString, (PathBuf, String)> = BTreeMap::new();
    for directory in directories(list, owners, &mut errors) {
        let names = directory.names().map_err(|error| vec![error.about(directory.path())])?;
        for name in names {
            let path = directory.path().join(&name);
            if path.extension().is_none_or(|extension| extension != "toml") {
                continue;
            }
            match directory.read(&name) {
                Ok(text) => {
                    files.insert(name, (path, text));
                }
                Err(error) => errors.push(error.about(&path)),
            }
        }
    }
    if !errors.is_empty() {
        return Err(errors);
    }
    let files: Vec<_> = files.into_values().collect();
    Policy::load_all(&files)
}

/// Reads one folder of a tools directory; nothing when it is no folder.
fn load_tool(
    parent: &TrustedDir,
    name: &OsString,
    around: &Surroundings<'_>,
) -> Result<Option<(Tool, String)>, FileError> {
    let Some(opened) = OpenedFolder::open(parent, name, MANIFEST, around.owners)? else { return Ok(None) };
    let manifest = ToolManifest::parse(&opened.file, &opened.text)?;
    opened.is_named(&manifest.name)?;
    let output = manifest.output_schema.iter().map(|schema| ("output", schema));
    for (key, schema) in [("input", &manifest.input_schema)].into_iter().chain(output) {
        trusted::file(&opened.folder.path().join(schema), around.owners)
            .map_err(|error| opened.refuse("contract", key, error.to_string()))?;
    }
    let (hindrance, as_read) = opened.examine(&manifest.program, around)?;
    let (folder, digest) = (opened.folder.path().to_owned(), as_read.digest());
    Ok(Some((Tool { manifest, folder, digest, hindrance, as_read }, opened.text)))
}

/// Reads one folder of an extensions directory; nothing when it is no folder.
fn load_extension(
    parent: &TrustedDir,
    name: &OsString,
    around: &Surroundings<'_>,
) -> Result<Option<(Extension, String)>, FileError> {
    let Some(opened) = OpenedFolder::open(parent, name, EXTENSION_MANIFEST, around.owners)? else { return Ok(None) };
    let manifest = ExtensionManifest::parse(&opened.file, &opened.text)?;
    opened.is_named(&manifest.name)?;
    let (hindrance, as_read) = opened.examine(&manifest.program, around)?;
    let (folder, digest) = (opened.folder.path().to_owned(), as_read.digest());
    Ok(Some((Extension { manifest, folder, digest, hindrance, as_read }, opened.text)))
}

/// A folder of a program, and its manifest's text.
struct OpenedFolder {
    name: OsString,
    folder: TrustedDir,
    file: PathBuf,
    text: String,
}

impl OpenedFolder {
    fn open(parent: &TrustedDir, name: &OsString, manifest: &str, owners: Owners) -> Result<Option<Self>, FileError> {
        let path = parent.path().join(name);
        if !path.is_dir() {
            return Ok(None);
        }
        let folder = TrustedDir::open(&path, owners).map_err(|error| error.about(&path))?;
        let file = folder.path().join(manifest);
        let text = folder.read(manifest.as_ref()).map_err(|error| error.about(&file))?;
        Ok(Some(Self { name: name.clone(), folder, file, text }))
    }

    fn is_named(&self, name: &str) -> Result<(), FileError> {
        if self.name.to_str() == Some(name) {
            return Ok(());
        }
        let reason = format!("the manifest names it `{name}`, its folder `{}`", self.name.to_string_lossy());
        Err(FileError { line: line_of_key(&self.text, "", "name"), file: self.file.clone(), reason })
    }

    fn refuse(&self, table: &str, key: &str, reason: String) -> FileError {
        FileError { file: self.file.clone(), line: line_of_key(&self.text, table, key), reason }
    }

    /// Why the program could not be run as it lies there, if so, and everything in the folder.
    fn examine(
        &self,
        program: &ConfinedProgram,
        around: &Surroundings<'_>,
    ) -> Result<(Option<FileError>, FolderAsRead), FileError> {
        let runtime = around.runtimes.get(&program.runtime);
        let entry = Entry {
            folder: self.folder.path(),
            entry: &program.entry,
            search: program.env.get("PATH").map(String::as_str),
            runtime: runtime.and_then(|runtime| runtime.as_ref().ok()),
            policy: around.policies.get(&program.policy),
            owners: around.owners,
        };
        let hindrance = entry.examine().map_err(|error| self.refuse("run", "entry", format!("entry: {error}")))?;
        let hindrance = hindrance.map(|reason| self.refuse("run", "entry", format!("entry: {reason}")));
        let without_runtime = || {
            let missing = runtime?.as_ref().err()?;
            Some(self.refuse("run", "runtime", missing.to_string()))
        };
        if around.owners == Owners::RootOnly {
            only_root_writes(self.folder.path()).map_err(|error| error.about(&self.file))?;
        }
        let unreadable = |error| FileError::whole(self.folder.path(), format!("the folder cannot be read: {error}"));
        let as_read = FolderAsRead::read(self.folder.as_fd(), Instant::now()).map_err(unreadable)?;
        Ok((without_runtime().or(hindrance), as_read))
    }
}

/// Checks everything below a folder that only root can write; nobody can change it meanwhile but root.
fn only_root_writes(folder: &Path) -> Result<(), trusted::TrustError> {
    let directory = TrustedDir::open(folder, Owners::RootOnly)?;
    for name in directory.all_names()? {
        let path = folder.join(&name);
        let kind = fs::symlink_metadata(&path).map(|found| found.file_type());
        match kind {
            Ok(kind) if kind.is_dir() => only_root_writes(&path)?,
            // A link is as good as the directory that holds it; where it leads, the sandbox decides.
            Ok(kind) if kind.is_symlink() => {}
            _ => {
                trusted::file(&path, Owners::RootOnly)?;
            }
        }
    }
    Ok(())
}

/// What manifests name, and whose files are believed.
struct Surroundings<'a> {
    runtimes: &'a BTreeMap<String, Result<Runtime, MissingRuntime>>,
    policies: &'a BTreeMap<String, Policy>,
    owners: Owners,
}

impl Surroundings<'_> {
    /// What a manifest names and the catalogue does not have, or its policy does not let it have.
    fn unmet(&self, program: &ConfinedProgram, file: &Path, text: &str) -> Vec<FileError> {
        let refuse = |table: &str, key: &str, reason| FileError {
            file: file.to_owned(),
            line: line_of_key(text, table, key).or_else(|| line_of_key(text, table, "")),
            reason,
        };
        let mut errors = Vec::new();
        if !self.runtimes.contains_key(&program.runtime) {
            errors.push(refuse("run", "runtime", unknown("runtime", &program.runtime, self.runtimes.keys())));
        }
        match self.policies.get(&program.policy) {
            Some(policy) => {
                let kept_from = program.hosts.iter().find_map(|host| policy.keeps_from(host));
                let without_place = || egress::passages(&program.hosts, |_| TlsMode::default()).err();
                let reason = kept_from.or_else(|| without_place().map(|error| error.to_string()));
                errors.extend(reason.map(|reason| refuse("sandbox", "hosts", reason)));
            }
            None => {
                errors.push(refuse("sandbox", "policy", unknown("policy", &program.policy, self.policies.keys())));
            }
        }
        errors
    }
}

fn unknown<'a>(what: &str, name: &str, known: impl IntoIterator<Item = &'a String>) -> String {
    format!("{what} `{name}` is unknown{}", alternatives(name, known.into_iter().map(String::as_str)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const POLICY: &str = "version = 1\nname = \"plain\"\nworkspace = \"none\"\n[[path]]\npath = \"/bin\"\naccess = \"read\"\n\
        why = \"sh\"\n[[path]]\npath = \"/usr/bin\"\naccess = \"read\"\nwhy = \"where /bin leads\"\n";
    const TOOL: &str = "version = 1\nname = \"count\"\ndescription = \"Counts.\"\n[run]\nruntime = \"exec\"\nentry = \"run\"\n\
        [contract]\ninput = \"in.json\"\n[sandbox]\npolicy = \"plain\"\n";

    const EXTENSION: &str = "version = 1\nname = \"guard\"\ndescription = \"Guards.\"\noperations = [\"before_turn\"]\n[run]\n\
        runtime = \"exec\"\nentry = \"main.py\"\n[sandbox]\npolicy = \"plain\"\n";

    struct Place(tempfile::TempDir);

    impl Place {
        fn new() -> Self {
            let place = Self(tempfile::tempdir().unwrap());
            place.write("policies/plain.toml", POLICY);
            place.write(
                "policies/open.toml",
                "version = 1\nname = \"open\"\nextends = \"plain\"\nnetwork = \"listed\"\n",
            );
            place.write("tools/count/tool.toml", TOOL);
            place.write_program("tools/count/run", "#!/bin/sh\n");
            place.write("tools/count/in.json", "{}");
            place.write("tools/README", "no folder");
            place.write("extensions/guard/extension.toml", EXTENSION);
            place.write_program("extensions/guard/main.py", "#!/bin/sh\n");
            place
        }

        fn write_program(&self, name: &str, text: &str) {
            self.write(name, text);
            self.set_mode(name, 0o755);
        }

        fn set_mode(&self, name: &str, mode: u32) {
            fs::set_permissions(self.0.path().join(name), fs::Permissions::from_mode(mode)).unwrap();
        }

        fn write(&self, name: &str, text: &str) {
            let path = self.0.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn load(&self, text: &str) -> Result<Catalog, Vec<FileError>> {
            let file = self.0.path().join("agentd.toml");
            let config =
                Config::parse(&file, &format!("version = 1\n[paths]\npolicies = [\"policies\"]\n{text}")).unwrap();
            Catalog::load(&config, Owners::RootOnly)
        }

        fn refused(&self) -> FileError {
            let mut errors = self.load("").unwrap_err();
            assert_eq!(errors.len(), 1, "{errors:?}");
            errors.remove(0)
        }
    }

    #[test]
    fn tools_and_policies_are_read_with_the_folders_digest() {
        let place = Place::new();
        let catalog = place.load("").unwrap();
        assert_eq!(catalog.policies.keys().collect::<Vec<_>>(), ["open", "plain"]);
        let before = catalog.tools["count"].digest;
        assert_eq!(place.load("").unwrap().tools["count"].digest, before);
        place.write("tools/count/run", "#!/bin/sh\nexit 1\n");
        assert_ne!(place.load("").unwrap().tools["count"].digest, before);
    }

    #[test]
    fn whatever_others_can_write_is_refused() {
        for name in [
            "tools",
            "tools/count",
            "tools/count/run",
            "tools/count/tool.toml",
            "policies/plain.toml",
            "policies",
            "extensions",
            "extensions/guard",
            "extensions/guard/extension.toml",
            "extensions/guard/main.py",
        ] {
            let place = Place::new();
            assert!(place.load("").is_ok());
            let path = place.0.path().join(name);
            let mode = fs::metadata(&path).unwrap().permissions().mode();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode | 0o002)).unwrap();
            let errors = place.load("").unwrap_err();
            assert!(errors.iter().any(|error| error.reason.contains("written by others")), "{name}: {errors:?}");
        }
        let place = Place::new();
        place.write("tools/count/lib/deep/module.py", "x = 1\n");
        std::os::unix::fs::chown(place.0.path().join("tools/count/lib/deep/module.py"), Some(1), None).unwrap();
        assert!(place.refused().reason.contains("must be root's"));
    }

    #[test]
    fn what_a_tool_names_must_exist() {
        let cases = [
            ("policy = \"plain\"", "policy = \"plainn\"", Some(10), "did you mean `plain`"),
            (
                "policy = \"plain\"",
                "policy = \"plain\"\nhosts = [\"a.example:1\"]",
                Some(11),
                "policy `plain` lets nobody out to a.example:1: network = \"none\"",
            ),
            (
                "policy = \"plain\"",
                "policy = \"open\"\nhosts = [\"a.example:443\", \"10.0.0.1:22\"]",
                Some(11),
                "10.0.0.1:22: it is a private address",
            ),
            ("policy = \"plain\"", "policy = \"open\"\nhosts = [\"224.0.0.1:22\"]", Some(11), "a multicast address"),
            ("runtime = \"exec\"", "runtime = \"exek\"", Some(5), "did you mean `exec`"),
            (
                "runtime = \"exec\"",
                "runtime = \"ruby\"",
                Some(5),
                "runtime `ruby` is unknown; known: `bun`, `exec`, `java`, `node`, `python`",
            ),
            ("input = \"in.json\"", "input = \"other.json\"", Some(8), "other.json"),
            ("name = \"count\"", "name = \"counts\"", Some(2), "its folder `count`"),
        ];
        for (from, to, line, words) in cases {
            let place = Place::new();
            place.write("tools/count/tool.toml", &TOOL.replace(from, to));
            let error = place.refused();
            assert_eq!(error.line, line, "{error}");
            assert!(error.reason.contains(words), "{error}");
        }
    }

    #[test]
    fn extensions_are_read_as_tools_are() {
        let place = Place::new();
        let extension = &place.load("").unwrap().extensions["guard"];
        assert_eq!((extension.manifest.name.as_str(), &extension.hindrance), ("guard", &None));
        for (from, to, line, words) in [
            ("policy = \"plain\"", "policy = \"plainn\"", Some(9), "did you mean `plain`"),
            ("runtime = \"exec\"", "runtime = \"exek\"", Some(6), "did you mean `exec`"),
            ("name = \"guard\"", "name = \"guards\"", Some(2), "its folder `guard`"),
        ] {
            place.write("extensions/guard/extension.toml", &EXTENSION.replace(from, to));
            let error = place.refused();
            assert_eq!(error.line, line, "{error}");
            assert!(error.reason.contains(words), "{error}");
        }
    }

    #[test]
    fn a_program_that_could_not_be_run_is_refused_with_its_line() {
        let cases: [(u32, &str, &str); 7] = [
            (0o644, "#!/bin/sh\n", "not executable by others (mode 0644)"),
            (0o700, "#!/bin/sh\n", "not executable by others (mode 0700)"),
            (0o711, "#!/bin/sh\n", "cannot be read by others (mode 0711)"),
            (0o755, "echo 1\n", "`#!/bin/sh`"),
            (0o755, "", "`#!/bin/sh`"),
            (0o755, "#!/bin/sh\r\n", "Unix line ends"),
            (0o755, "#!sh\n", "no absolute path"),
        ];
        for (mode, text, words) in cases {
            let place = Place::new();
            place.write("tools/count/run", text);
            place.set_mode("tools/count/run", mode);
            let error = place.refused();
            assert_eq!((&error.file, error.line), (&place.0.path().join("tools/count/tool.toml"), Some(6)), "{error}");
            assert!(error.reason.starts_with("entry: ") && error.reason.contains(words), "{error}");
        }
        let place = Place::new();
        place.write("tools/count/tool.toml", &TOOL.replace("entry = \"run\"", "entry = \"bin/run\""));
        place.write_program("tools/count/bin/run", "#!/bin/sh\n");
        assert!(place.load("").is_ok());
        place.set_mode("tools/count/bin", 0o700);
        assert!(place.refused().reason.contains("bin cannot be entered by others"));
        let place = Place::new();
        place.set_mode("extensions/guard/main.py", 0o644);
        assert_eq!(place.refused().line, Some(7));
    }

    #[test]
    fn what_an_interpreter_runs_needs_no_execute_bit_but_must_be_readable() {
        let place = Place::new();
        place.write("tools/count/tool.toml", &TOOL.replace("runtime = \"exec\"", "runtime = \"shell\""));
        place.set_mode("tools/count/run", 0o644);
        let shell = "[runtimes.shell]\ncommand = \"/bin/sh\"\n";
        assert_eq!(place.load(shell).unwrap().hindrances().count(), 0);
        place.set_mode("tools/count/run", 0o600);
        let errors = place.load(shell).unwrap_err();
        assert!(errors[0].reason.contains("cannot be read by others (mode 0600)"), "{errors:?}");
    }

    #[test]
    fn what_the_host_lacks_or_the_policy_hides_concerns_its_own_tool_only() {
        let outside = tempfile::tempdir().unwrap();
        let script = |line: &str| format!("#!{line}\nexit\n");
        let shown: [&str; 5] =
            ["/bin/sh -e", "/usr/bin/env sh", "/usr/bin/env -S A=1 sh -e", "/workspace/own/sh", "/usr/bin/env -i"];
        for line in shown {
            let place = Place::new();
            place.write("tools/count/run", &script(line));
            assert_eq!(place.load("").unwrap().tools["count"].hindrance, None, "{line}");
        }
        let hidden = outside.path().join("sh");
        fs::copy("/bin/sh", &hidden).unwrap();
        let hindered = [
            ("/usr/bin/no-such-shell", "/usr/bin/no-such-shell, and this host has no such program"),
            ("/tool/lib/sh", "/tool/lib/sh, and this host has no such program"),
            ("/usr/bin", "no such program"),
            ("/usr/bin/env no-such-shell", "look for `no-such-shell`, which is not on /usr/local/bin:"),
            ("/usr/bin/env sh -e", "look for `sh -e`"),
            ("/sbin/ldconfig", "/sbin/ldconfig, which policy `plain` does not show"),
        ];
        for (line, words) in hindered {
            let place = Place::new();
            place.write("tools/count/run", &script(line));
            let hindrance = place.load("").unwrap().tools["count"].hindrance.clone().unwrap();
            assert!(hindrance.line == Some(6) && hindrance.reason.contains(words), "{line}: {hindrance}");
        }
        let place = Place::new();
        fs::remove_file(place.0.path().join("tools/count/run")).unwrap();
        std::os::unix::fs::symlink(&hidden, place.0.path().join("tools/count/run")).unwrap();
        let reason = place.load("").unwrap().tools["count"].hindrance.clone().unwrap().reason;
        assert!(reason.contains("leads to") && reason.contains("policy `plain` does not show"), "{reason}");
    }

    #[test]
    fn a_program_that_is_not_built_yet_or_has_no_runtime_concerns_its_own_tool_only() {
        let place = Place::new();
        assert_eq!(place.load("").unwrap().hindrances().count(), 0);
        place.write("tools/count/tool.toml", &TOOL.replace("entry = \"run\"", "entry = \"main\""));
        let catalog = place.load("").unwrap();
        let hindrance = catalog.tools["count"].hindrance.clone().unwrap();
        assert!(hindrance.line == Some(6) && hindrance.reason.contains("tools/count/main is missing"), "{hindrance}");
        assert_eq!(catalog.hindrances().collect::<Vec<_>>(), [&hindrance]);
        place.write("tools/count/tool.toml", &TOOL.replace("runtime = \"exec\"", "runtime = \"gone\""));
        let catalog = place.load("[runtimes.gone]\ncommand = \"/usr/bin/no-such\"\n").unwrap();
        let hindrance = catalog.tools["count"].hindrance.clone().unwrap();
        assert!(
            hindrance.line == Some(5) && hindrance.reason.contains("/usr/bin/no-such does not exist"),
            "{hindrance}"
        );
    }

    #[test]
    fn a_missing_default_directory_is_skipped_and_a_named_one_is_not() {
        let place = Place::new();
        fs::remove_dir_all(place.0.path().join("tools")).unwrap();
        assert!(place.load("").is_ok());
        assert!(place.load("tools = [\"tools\"]\n").is_err());
    }

    #[test]
    fn a_later_directorys_policy_replaces_an_earlier_ones() {
        let place = Place::new();
        place.write("own/plain.toml", &POLICY.replace("none", "read_only"));
        let file = place.0.path().join("agentd.toml");
        let load = |list: &str| {
            let config = Config::parse(&file, &format!("version = 1\n[paths]\npolicies = {list}\n")).unwrap();
            Catalog::load(&config, Owners::RootOnly).unwrap().policies["plain"].identity().digest
        };
        assert_eq!(load("[\"policies\", \"own\"]"), load("[\"own\"]"));
        assert_ne!(load("[\"policies\", \"own\"]"), load("[\"policies\"]"));
    }
}
