//! Settings in a JSON object, with errors that name file and key.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::Error;

/// A file that holds a JSON object.
pub(crate) fn read_object(file: &Path) -> Result<Map<String, Value>, Error> {
    let bytes = fs::read(file).map_err(|reason| Error::Io { path: file.to_owned(), reason })?;
    let wrong = |found: String| Error::Json { file: file.to_owned(), found, expected: "a JSON object" };
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(wrong(other.to_string().chars().take(40).collect())),
        Err(error) => Err(wrong(error.to_string())),
    }
}

/// The same for a file that may be absent.
pub(crate) fn read_optional(file: &Path) -> Result<Option<Map<String, Value>>, Error> {
    match file.try_exists() {
        Ok(false) => Ok(None),
        Ok(true) => read_object(file).map(Some),
        Err(reason) => Err(Error::Io { path: file.to_owned(), reason }),
    }
}

/// An object of settings. A key that is null counts as absent.
#[derive(Clone, Copy)]
pub(crate) struct Settings<'a> {
    pub(crate) file: &'a Path,
    pub(crate) map: &'a Map<String, Value>,
}

impl<'a> Settings<'a> {
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    pub(crate) fn error(&self, key: &str, expected: &str) -> Error {
        let found = self.map.get(key).map_or_else(|| "nothing".to_owned(), Value::to_string);
        Error::setting(self.file, key, found, expected)
    }

    /// A dimension: from 1 to 2^31 - 1, as MLX's shapes are 32-bit.
    pub(crate) fn dimension(&self, key: &str) -> Result<i32, Error> {
        let value = self.get(key).and_then(Value::as_u64).and_then(|n| i32::try_from(n).ok());
        value.filter(|&n| n > 0).ok_or_else(|| self.error(key, "a whole number from 1 to 2147483647"))
    }

    pub(crate) fn dimension_or(&self, key: &str, default: i32) -> Result<i32, Error> {
        self.get(key).map_or(Ok(default), |_| self.dimension(key))
    }

    /// A finite number above zero.
    pub(crate) fn positive(&self, key: &str) -> Result<f64, Error> {
        let value = self.get(key).and_then(Value::as_f64).filter(|&x| x > 0.0 && x.is_finite());
        value.ok_or_else(|| self.error(key, "a number above zero"))
    }

    pub(crate) fn positive_or(&self, key: &str, default: f64) -> Result<f64, Error> {
        self.get(key).map_or(Ok(default), |_| self.positive(key))
    }

    pub(crate) fn flag(&self, key: &str) -> Result<bool, Error> {
        match self.get(key) {
            None => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| self.error(key, "true or false")),
        }
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => value.as_str().map(Some).ok_or_else(|| self.error(key, "a string")),
        }
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<Settings<'a>>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Settings { file: self.file, map })),
            Some(_) => Err(self.error(key, "an object")),
        }
    }
}
