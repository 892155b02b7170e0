//! What is left when writing fails or is killed: nothing, or one file that the next output removes.
#![cfg(unix)]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use twofour::{
    Error,
    file::{Compress, Convert, Index, Overwrite, PlannedTensor, StoredDType, TEMP_PREFIX, TEMP_SUFFIX, Writer},
};

const DIRECTORY: &str = "TWOFOUR_TEST_DIRECTORY";

/// Elements of the weights in these tests: 256 KiB of f32, half of them zero.
const ROWS: usize = 256;

fn write_model(path: &Path) -> twofour::Result<()> {
    let w: Vec<f32> = (0..ROWS * 256).map(|i| if i % 4 < 2 { i as f32 } else { 0.0 }).collect();
    let plan = vec![PlannedTensor::new("w", StoredDType::F32, [ROWS, 256])];
    let mut writer = Writer::create(path, Overwrite::No, plan, BTreeMap::new())?;
    writer.write_elements("w", &w)?;
    writer.finish()
}

fn entries(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Runs one of the ignored tests below in a process of its own, behind a shell command that prepares it.
fn child(prepare: &str, test: &str, directory: &Path) -> Child {
    Command::new("sh")
        .args(["-c", &format!("{prepare} exec \"$0\" --exact interrupted_writing::{test} --ignored --nocapture")])
        .arg(std::env::current_exe().unwrap())
        .env(DIRECTORY, directory)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Where a child shall write; `None` where the test was not started as a child.
fn directory_of_child() -> Option<PathBuf> {
    std::env::var_os(DIRECTORY).map(PathBuf::from)
}

/// A limit on file sizes stands in for a full disk: the write is refused half-way through a tensor.
#[test]
fn a_full_disk_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    write_model(&directory.path().join("in.safetensors")).unwrap();
    let sharded = directory.path().join("sharded");
    fs::create_dir(&sharded).unwrap();
    let mut index = Index { metadata: Default::default(), weight_map: BTreeMap::new() };
    // The first shard is small enough to be written in full.
    let plan = vec![PlannedTensor::new("a", StoredDType::U8, [1])];
    let mut writer = Writer::create(sharded.join("1.safetensors"), Overwrite::No, plan, BTreeMap::new()).unwrap();
    writer.write("a", &[1]).unwrap();
    writer.finish().unwrap();
    write_model(&sharded.join("2.safetensors")).unwrap();
    index.weight_map.insert("a".to_owned(), "1.safetensors".to_owned());
    index.weight_map.insert("w".to_owned(), "2.safetensors".to_owned());
    fs::write(sharded.join("model.safetensors.index.json"), index.to_json()).unwrap();

    let before = entries(directory.path());
    // 64 blocks of 512 bytes (of 1024 in some shells); the signal that comes with it is ignored, as a full disk sends
    // none.
    let status = child("trap '' XFSZ; ulimit -f 64;", "writing_beyond_the_limit", directory.path()).wait().unwrap();
    assert!(status.success());
    assert_eq!(entries(directory.path()), before);
}

#[test]
#[ignore = "run by a_full_disk_leaves_nothing, under a limit"]
fn writing_beyond_the_limit() {
    let Some(directory) = directory_of_child() else { return };
    let expect_refusal = |outcome: twofour::Result<()>| match outcome {
        Err(Error::Io { action: "writing", path, .. }) => assert!(path.starts_with(&directory), "{path:?}"),
        other => panic!("{other:?}"),
    };
    expect_refusal(write_model(&directory.join("out.safetensors")));
    let options = Compress::default();
    for (input, output) in [("in.safetensors", "out.safetensors"), ("sharded", "out")] {
        let outcome = Convert::open(directory.join(input)).unwrap().run(directory.join(output), options);
        expect_refusal(outcome.map(|_| ()));
    }
}

/// A file system of 128 KiB, where the system lets an ordinary user mount one.
#[test]
fn a_file_system_without_space_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let mount = format!("mount -t tmpfs -o size=128k none '{}'", directory.path().display());
    let possible = Command::new("unshare").args(["-rm", "sh", "-c", &mount]).output();
    if !possible.is_ok_and(|o| o.status.success()) {
        eprintln!("skipped: no file system can be mounted here");
        return;
    }
    let test = "interrupted_writing::writing_to_a_full_disk";
    let prepare = format!("exec unshare -rm sh -c \"{mount} && exec '$0' --exact {test} --ignored\";");
    assert!(child(&prepare, "", directory.path()).wait().unwrap().success());
}

#[test]
#[ignore = "run by a_file_system_without_space_is_an_error, on a small file system"]
fn writing_to_a_full_disk() {
    let Some(directory) = directory_of_child() else { return };
    match write_model(&directory.join("out.safetensors")) {
        Err(Error::Io { action: "writing", source, .. }) => assert_eq!(source.kind(), std::io::ErrorKind::StorageFull),
        other => panic!("{other:?}"),
    }
    assert!(entries(&directory).is_empty());
}

/// Where the file system has files without a name, a killed process leaves nothing; elsewhere the next output cleans
/// up.
#[test]
fn a_killed_process_leaves_nothing_for_long() {
    let directory = tempfile::tempdir().unwrap();
    let mut child = child("", "writing_for_ever", directory.path());
    let began = Instant::now();
    while !directory.path().join("ready").exists() {
        assert!(began.elapsed() < Duration::from_secs(60), "the child does not begin");
        assert!(child.try_wait().unwrap().is_none(), "the child ended");
        sleep(Duration::from_millis(5));
    }
    // Another output leaves the file of the living process alone.
    write_model(&directory.path().join("meanwhile.safetensors")).unwrap();
    let before = entries(directory.path());
    child.kill().unwrap();
    child.wait().unwrap();
    let left = entries(directory.path());
    assert_eq!(left, before);
    match left.as_slice() {
        [meanwhile, ready] => assert_eq!((&**meanwhile, &**ready), ("meanwhile.safetensors", "ready")),
        [temporary, ..] => {
            assert!(temporary.starts_with(TEMP_PREFIX) && temporary.ends_with(TEMP_SUFFIX), "{left:?}");
            assert!(!has_unnamed_files(directory.path()), "{left:?}");
        }
        [] => panic!("everything is gone"),
    }
    write_model(&directory.path().join("out.safetensors")).unwrap();
    assert_eq!(entries(directory.path()), ["meanwhile.safetensors", "out.safetensors", "ready"]);
}

/// Whether the directory's file system has files without a name.
fn has_unnamed_files(directory: &Path) -> bool {
    use std::os::unix::fs::OpenOptionsExt;
    #[cfg(target_os = "linux")]
    let flag = rustix::fs::OFlags::TMPFILE.bits().cast_signed();
    #[cfg(not(target_os = "linux"))]
    return false;
    #[cfg(target_os = "linux")]
    fs::OpenOptions::new().read(true).write(true).custom_flags(flag).open(directory).is_ok()
}

#[test]
#[ignore = "run by a_killed_process_leaves_nothing_for_long, and killed"]
fn writing_for_ever() {
    let Some(directory) = directory_of_child() else { return };
    let plan = vec![PlannedTensor::new("a", StoredDType::U8, [1]), PlannedTensor::new("b", StoredDType::U8, [1])];
    let mut writer = Writer::create(directory.join("out.safetensors"), Overwrite::No, plan, BTreeMap::new()).unwrap();
    writer.write("a", &[1]).unwrap();
    fs::write(directory.join("ready"), "").unwrap();
    sleep(Duration::from_secs(120));
    writer.write("b", &[1]).unwrap();
}
