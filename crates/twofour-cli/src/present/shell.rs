//! Words of a command line that a person may copy.

use std::path::Path;

use super::escape::is_hidden;

/// The path as a shell reads it back: quoted where it has characters that mean something to a shell, and never taken
/// for an option.
pub(crate) fn word(path: &Path) -> String {
    let text = path.as_os_str().as_encoded_bytes();
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"._/@%+=:,-".contains(byte);
    let dash = if text.starts_with(b"-") { "./" } else { "" };
    if !text.is_empty() && text.iter().all(is_plain) {
        return format!("{dash}{}", String::from_utf8_lossy(text));
    }
    match std::str::from_utf8(text) {
        Ok(text) if !text.chars().any(is_hidden) => format!("'{dash}{}'", text.replace('\'', r"'\''")),
        // Bash's and zsh's quotes for bytes that a terminal would obey or cannot show.
        _ => {
            let byte = |byte: &u8| match byte {
                b'\'' | b'\\' => format!("\\{}", char::from(*byte)),
                b' '..=b'~' => char::from(*byte).to_string(),
                _ => format!("\\x{byte:02x}"),
            };
            format!("$'{dash}{}'", text.iter().map(byte).collect::<String>())
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt, process::Command};

    use super::*;

    #[test]
    fn a_shell_reads_the_path_back() {
        let paths: [&[u8]; 10] = [
            b"a/b-24.safetensors",
            b"my model",
            b"it's",
            b"-o",
            b"$HOME `x` \"y\"",
            b"a\x1b[31m\nb",
            b"\xff\\'",
            b"",
            "ü ".as_bytes(),
            "a\u{202e}b\u{2028}".as_bytes(),
        ];
        for path in paths {
            let path = Path::new(OsStr::from_bytes(path));
            let script = format!("printf %s {}", word(path));
            let Ok(read) = Command::new("bash").args(["-c", &script]).output() else { return };
            let given = if path.starts_with("-o") { b"./-o".to_vec() } else { path.as_os_str().as_bytes().to_vec() };
            assert_eq!(read.stdout, given, "{script}");
        }
        assert_eq!(word(Path::new("a/b-24.safetensors")), "a/b-24.safetensors");
    }
}
