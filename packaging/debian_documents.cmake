# CPack runs this in the staged tree of the Debian package.
set(documents ${CPACK_TEMPORARY_INSTALL_DIRECTORY}/usr/share/doc/annulus)
file(REMOVE ${documents}/LICENSE)
file(WRITE ${documents}/copyright
"Annulus is copyright 2026 the Annulus authors, under the Apache License, Version 2.0.
On Debian systems, its text is in /usr/share/common-licenses/Apache-2.0.
")
file(RENAME ${documents}/CHANGELOG.md ${documents}/changelog)
string(TIMESTAMP now "%a, %d %b %Y %H:%M:%S +0000" UTC)
file(WRITE ${documents}/changelog.Debian
"annulus (${CPACK_PACKAGE_VERSION}-${CPACK_DEBIAN_PACKAGE_RELEASE}) unstable; urgency=medium

  * Built from the sources by packaging/debian: see changelog.gz.

 -- ${CPACK_PACKAGE_CONTACT}  ${now}
")
execute_process(COMMAND gzip --best --no-name ${documents}/changelog ${documents}/changelog.Debian
  COMMAND_ERROR_IS_FATAL ANY)
