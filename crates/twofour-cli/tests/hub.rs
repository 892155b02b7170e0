//! Models by name, from a hub on this machine.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    sync::{Arc, Mutex},
    thread,
};

use crate::support::{self, Ran, model, twofour};

const SHA: &str = "0123456789abcdef0123456789abcdef01234567";

/// A server of one repository, `owner/name`, which answers what the hub answers.
struct Hub {
    address: String,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Hub {
    fn with(files: BTreeMap<String, Vec<u8>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&asked);
        thread::spawn(move || {
            for stream in listener.incoming() {
                answer(stream.unwrap(), &files, &log);
            }
        });
        Hub { address, asked }
    }

    fn run(&self, home: &Path, arguments: &[&str], offline: bool) -> Ran {
        let mut command = twofour();
        command.args(arguments).current_dir(home).env("HF_HOME", home.join("hf")).env("HF_ENDPOINT", &self.address);
        command.env("HF_HUB_OFFLINE", if offline { "1" } else { "0" }).env_remove("HF_TOKEN");
        command.output().unwrap().into()
    }

    fn downloads(&self) -> usize {
        self.asked.lock().unwrap().iter().filter(|path| path.contains("/resolve/")).count()
    }
}

fn answer(mut stream: TcpStream, files: &BTreeMap<String, Vec<u8>>, log: &Mutex<Vec<String>>) {
    let mut lines =
        BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok).take_while(|line| !line.is_empty());
    let Some(request) = lines.next() else { return };
    let range = lines.find_map(|line| line.to_lowercase().strip_prefix("range: bytes=").map(str::to_owned));
    let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
    log.lock().unwrap().push(path.clone());
    let known = path
        .strip_prefix(&format!("/owner/name/resolve/{SHA}/"))
        .and_then(|name| files.get(name).map(|bytes| (name, bytes)));
    let (status, headers, body) = if path.starts_with("/api/models/owner/name") {
        let siblings: Vec<_> = files.keys().map(|name| serde_json::json!({ "rfilename": name })).collect();
        ("200 OK", String::new(), serde_json::json!({ "sha": SHA, "siblings": siblings }).to_string().into_bytes())
    } else if let Some((name, bytes)) = known {
        let (first, last) = range.as_deref().and_then(|range| range.split_once('-')).unwrap_or(("0", ""));
        let first: usize = first.parse().unwrap();
        let last = last.parse().unwrap_or(bytes.len() - 1).min(bytes.len() - 1);
        let headers = format!(
            "ETag: \"{name}\"\r\nX-Repo-Commit: {SHA}\r\nContent-Range: bytes {first}-{last}/{}\r\n",
            bytes.len()
        );
        ("206 Partial Content", headers, bytes[first..=last].to_vec())
    } else {
        ("404 Not Found", String::new(), b"Repository not found".to_vec())
    };
    let head = format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
}

/// The files of a small model, with some that are no part of it.
fn files() -> BTreeMap<String, Vec<u8>> {
    let (_directory, path) = model();
    BTreeMap::from([
        ("config.json".into(), br#"{"model_type":"none"}"#.to_vec()),
        ("model.safetensors".into(), fs::read(path).unwrap()),
        ("onnx/model.onnx".into(), vec![0; 10]),
        ("pytorch_model.bin".into(), vec![0; 10]),
    ])
}

#[test]
fn a_model_by_name_is_downloaded_once_pruned_and_found_offline() {
    let home = tempfile::tempdir().unwrap();
    let hub = Hub::with(files());
    let run = |arguments: &[&str], offline| hub.run(home.path(), arguments, offline);
    run(&["prune", "owner/name", "-o", "pruned"], false).good();
    assert_eq!(support::names(&home.path().join("pruned")), ["config.json", "model.safetensors"]);
    run(&["check", "pruned"], false).good();
    let asked = hub.downloads();
    assert!(
        asked >= 2 && hub.asked.lock().unwrap().iter().all(|path| !path.contains("onnx") && !path.contains(".bin"))
    );
    run(&["inspect", "owner/name"], false).good();
    run(&["inspect", "owner/name"], true).good();
    assert_eq!(hub.downloads(), asked, "it was in the cache");
}

#[test]
fn what_is_neither_here_nor_there_is_said() {
    let home = tempfile::tempdir().unwrap();
    let hub = Hub::with(files());
    let message = hub.run(home.path(), &["inspect", "owner/other"], false).bad(1);
    assert!(message.contains("owner/other: nothing is at this path") && message.contains("404"), "{message}");
    let message = hub.run(home.path(), &["inspect", "owner/name"], true).bad(1);
    assert!(message.contains("HF_HUB_OFFLINE"), "{message}");

    let hub = Hub::with(BTreeMap::from([("tf_model.h5".to_owned(), vec![0; 10])]));
    let message = hub.run(home.path(), &["inspect", "owner/name"], false).bad(1);
    assert!(message.contains("no pytorch_model.bin in its root; it has tf_model.h5"), "{message}");
}

#[test]
fn a_model_in_files_of_pytorch_alone_is_downloaded_and_pruned() {
    let home = tempfile::tempdir().unwrap();
    let weights = Path::new(env!("CARGO_MANIFEST_DIR")).join("../twofour/tests/fixtures/pytorch/training.ckpt");
    let hub = Hub::with(BTreeMap::from([
        ("config.json".into(), br#"{"model_type":"none"}"#.to_vec()),
        ("pytorch_model.bin".into(), fs::read(weights).unwrap()),
    ]));
    hub.run(home.path(), &["prune", "owner/name", "-o", "pruned"], false).good();
    assert_eq!(support::names(&home.path().join("pruned")), ["config.json", "model.safetensors"]);
    hub.run(home.path(), &["check", "pruned"], false).good();
}
