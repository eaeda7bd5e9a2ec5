//! Files and folders that stay where they are put: what one needs to write something whole or not at all.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::io_error;
use crate::error::ArtifactError;

/// A file that is nothing until it is published: written beside its destination under another name, then synced and
/// renamed. Dropped before that it leaves nothing behind; a killed process leaves `.NAME.` and six characters.
///
/// ```
/// use trellis_codec::artifact::NewFile;
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("report.json");
/// let mut file = NewFile::create(&path)?;
/// file.write(b"{}\n")?;
/// assert!(!path.exists());
/// file.publish()?;
/// assert_eq!(std::fs::read(&path)?, b"{}\n");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct NewFile {
    destination: PathBuf,
    file: BufWriter<NamedTempFile>,
}

impl NewFile {
    /// Begins a file that [`NewFile::publish`] will put at `destination`, whose folder exists.
    ///
    /// # Errors
    /// A destination without a name, or a folder that cannot be written.
    pub fn create(destination: impl AsRef<Path>) -> Result<Self, ArtifactError> {
        let destination = destination.as_ref().to_owned();
        let Some(prefix) = temporary_prefix(&destination) else {
            return Err(ArtifactError::Destination { path: destination });
        };
        let mut builder = tempfile::Builder::new();
        builder.prefix(&prefix);
        // As any other new file, less the umask; a temporary one is otherwise its owner's alone.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let file = builder
            .tempfile_in(parent(&destination))
            .map_err(io_error(&destination, "create a temporary file beside it"))?;
        Ok(Self { destination, file: BufWriter::new(file) })
    }

    /// Appends bytes, through a buffer.
    ///
    /// # Errors
    /// What the system says.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), ArtifactError> {
        self.file.write_all(bytes).map_err(io_error(&self.destination, "write"))
    }

    /// Makes the file durable and gives it its name, in place of a file that has it.
    ///
    /// # Errors
    /// A failure to write, sync or rename: whatever was at the destination is then still there, unless what failed is
    /// the last step, to make the rename durable.
    pub fn publish(self) -> Result<(), ArtifactError> {
        self.put(|file, destination| {
            file.persist(destination).map_err(|e| io_error(destination, "write")(e.error))
        })
    }

    /// As [`NewFile::publish`], but refuses to replace a file.
    ///
    /// # Errors
    /// As [`NewFile::publish`], and a destination that exists.
    pub fn publish_new(self) -> Result<(), ArtifactError> {
        self.put(|file, destination| {
            file.persist_noclobber(destination).map_err(|e| match e.error.kind() {
                io::ErrorKind::AlreadyExists => ArtifactError::Exists { path: destination.to_owned() },
                _ => io_error(destination, "write")(e.error),
            })
        })
    }

    fn put(
        self,
        rename: impl FnOnce(NamedTempFile, &Path) -> Result<File, ArtifactError>,
    ) -> Result<(), ArtifactError> {
        let Self { destination, file } = self;
        // Opened first: a folder that cannot be synced must not be found out after the rename.
        let folder = Folder::open(parent(&destination))?;
        let file = file.into_inner().map_err(|e| io_error(&destination, "write")(e.into_error()))?;
        file.as_file().sync_all().map_err(io_error(&destination, "sync"))?;
        rename(file, &destination)?;
        folder.sync()
    }
}

/// A folder whose entries can be made durable; only Unix has a way to ask for it.
pub(super) struct Folder {
    path: PathBuf,
    handle: Option<File>,
}

impl Folder {
    pub(super) fn open(path: &Path) -> Result<Self, ArtifactError> {
        let handle = cfg!(unix).then(|| File::open(path)).transpose().map_err(io_error(path, "open"))?;
        Ok(Self { path: path.to_owned(), handle })
    }

    pub(super) fn sync(&self) -> Result<(), ArtifactError> {
        match self.handle.as_ref().map(File::sync_all) {
            // Some file systems have no such call for folders; there is nothing to be gained by failing.
            Some(Err(e)) if !matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => {
                Err(io_error(&self.path, "sync")(e))
            }
            _ => Ok(()),
        }
    }
}

/// The folder that a path's last component is in.
pub(super) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// What the name of something temporary beside `destination` begins with; `None` where that has no name.
pub(super) fn temporary_prefix(destination: &Path) -> Option<String> {
    Some(format!(".{}.", destination.file_name()?.to_string_lossy()))
}
