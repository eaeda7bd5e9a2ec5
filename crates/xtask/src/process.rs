//! Running other programs, with errors that name the program.

use std::fmt;
use std::process::{Command, ExitCode, ExitStatus, Stdio};

use anyhow::{Context, Result, bail};

/// A command that was run in front of the user and failed; it has printed its own reasons.
#[derive(Debug)]
pub(crate) struct Failed {
    command: String,
    status: ExitStatus,
}

impl Failed {
    /// The code to end with: the child's own, so that scripts see it.
    pub(crate) fn exit_code(&self) -> ExitCode {
        self.status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from)
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` failed ({})", self.command, self.status)
    }
}

impl std::error::Error for Failed {}

/// Prints one line of progress.
pub(crate) fn say(line: impl fmt::Display) {
    eprintln!("xtask: {line}");
}

/// Echoes a command and runs it with the terminal's own output.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = display(command);
    say(format_args!("$ {line}"));
    let status = command.status().with_context(|| format!("cannot start `{line}`"))?;
    if status.success() { Ok(()) } else { Err(Failed { command: line, status }.into()) }
}

/// Runs a command quietly and returns its stdout.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let line = display(command);
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start `{line}`"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`{line}` failed ({}):\n{}", output.status, said.trim_end());
    }
    String::from_utf8(output.stdout).with_context(|| format!("`{line}` wrote something that is not UTF-8"))
}

/// The command as one would type it, without its folder and environment.
pub(crate) fn display(command: &Command) -> String {
    let program = command.get_program().to_string_lossy();
    // Cargo hands over its own absolute path, which only hides the command.
    let program = if program.ends_with("/cargo") { "cargo".into() } else { program };
    let mut line = program.into_owned();
    for argument in command.get_args() {
        let argument = argument.to_string_lossy();
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:+,@%".contains(c);
        line.push(' ');
        if !argument.is_empty() && argument.chars().all(plain) {
            line.push_str(&argument);
        } else {
            line.push_str(&format!("'{}'", argument.replace('\'', r"'\''")));
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_read_as_typed() {
        let mut command = Command::new("/somewhere/bin/cargo");
        command.args(["run", "--", "a b", "it's", ""]);
        assert_eq!(display(&command), r"cargo run -- 'a b' 'it'\''s' ''");
    }

    #[test]
    fn failures_name_the_command() {
        let error = output(&mut Command::new("/no/such/program")).unwrap_err();
        assert_eq!(error.to_string(), "cannot start `/no/such/program`");
        let error = output(Command::new("sh").args(["-c", "echo why >&2; exit 3"])).unwrap_err().to_string();
        assert!(error.starts_with("`sh -c 'echo why >&2; exit 3'` failed"), "{error}");
        assert!(error.ends_with("3):\nwhy"), "{error}");
    }
}
